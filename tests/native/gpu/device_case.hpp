// Arrays on the host and on a device, and the comparison of what kernels have made of both.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "launch/device.hpp"
#include "ops/common/dispatch.hpp"
#include "random_cases.hpp"

namespace pydist::testing {

inline int passed = 0, failed = 0;
inline cuda::Queue queue;  // of main()

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

// An array on the host and on the device, up to the end of its memory. It may begin behind some
// elements: a slice of a tensor is aligned to an element, not to a word.
class Array {
 public:
  // Multiples of `scale` / 8: by default, products and short sums are exact in every format.
  Array(Random& random, DType dtype, const Coords& shape, const Coords& strides, double scale = 1)
      : begin_(random.chance(0.5) ? 0 : random.between(1, 3) * size_of(dtype)),
        memory_(static_cast<std::size_t>(begin_ + volume_of(shape) * size_of(dtype))) {
    view_ = {memory_.data() + begin_, dtype, shape, strides, {}};
    ops::dispatch(dtype, [&]<class T>(std::type_identity<T>) {
      T* const values = static_cast<T*>(view_.data);
      for (index_t i = 0; i < view_.elements(); ++i) {
        if constexpr (requires { T::from(0.0f); }) {
          values[i] = T::from(static_cast<float>(scale * random.value()));
        } else if constexpr (std::is_same_v<T, bool>) {
          values[i] = random.chance(0.5);
        } else if constexpr (std::is_integral_v<T>) {
          values[i] = static_cast<T>(random.between(-16, 16));
        } else {
          values[i] = static_cast<T>(scale * random.value());
        }
      }
    });
    check(cudaMalloc(&device_, memory_.size()));
    check(cudaMemcpy(device_, memory_.data(), memory_.size(), cudaMemcpyHostToDevice));
    // It may return before the copy has arrived, and the queue's stream does not wait for it.
    check(cudaDeviceSynchronize());
  }
  Array(Random& random, DType dtype, const Coords& shape)
      : Array(random, dtype, shape, random.strides_for(shape)) {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { cudaFree(device_); }

  const TensorView& host() const { return view_; }
  TensorView device() const {
    TensorView view = view_;
    view.data = static_cast<std::byte*>(device_) + begin_;
    view.device = {DeviceType::kCuda, 0};
    return view;
  }

  // Largest difference between host and device, by the largest value. What lies before the array
  // must not have been written.
  double error() const {
    std::vector<std::byte> found(memory_.size());
    check(cudaMemcpy(found.data(), device_, found.size(), cudaMemcpyDeviceToHost));
    if (!std::equal(memory_.begin(), memory_.begin() + begin_, found.begin())) return 1e300;
    double worst = 0, largest = 1e-30;
    ops::dispatch(view_.dtype, [&]<class T>(std::type_identity<T>) {
      const T* const expected = static_cast<const T*>(view_.data);
      const T* const got = reinterpret_cast<const T*>(found.data() + begin_);
      for (index_t i = 0; i < view_.elements(); ++i) {
        const auto a = static_cast<double>(ops::load_as(expected[i]));
        const auto b = static_cast<double>(ops::load_as(got[i]));
        largest = std::max(largest, std::abs(a));
        worst = a == b ? worst : std::max(worst, std::isnan(a - b) ? 1e300 : std::abs(a - b));
      }
    });
    return worst / largest;
  }

 private:
  index_t begin_;  // bytes
  std::vector<std::byte> memory_;
  TensorView view_;
  void* device_ = nullptr;
};

// Compares what both have written, once the device is done.
inline void expect(const char* name, const Array& target, double tolerance) {
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(queue.stream)));
  const double error = target.error();
  if (error <= tolerance) {
    ++passed;
  } else {
    ++failed;
    std::printf("FAILED %s (%s): error %.3g, %.3g is allowed\n", name,
                std::string(name_of(target.host().dtype)).c_str(), error, tolerance);
  }
}

inline double tolerance_of(DType dtype) {
  if (dtype == DType::kFloat64) return 1e-13;
  if (dtype == DType::kFloat32) return 1e-5;
  return dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7;
}

// Of an array that lies in memory as [N, C, ...] or, channels last, as [N, ..., C].
inline Coords strides_of(const Coords& shape, bool channels_last) {
  Coords strides(shape.ndim());
  index_t stride = 1;
  const auto next = [&](int dim) {
    strides[dim] = stride;
    stride *= shape[dim];
  };
  if (channels_last) next(1);
  for (int dim = shape.ndim() - 1; dim >= 0; --dim) {
    if (dim != 1 || !channels_last) next(dim);
  }
  return strides;
}

inline constexpr DType kFloating[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16,
                                      DType::kBFloat16};

}  // namespace pydist::testing
