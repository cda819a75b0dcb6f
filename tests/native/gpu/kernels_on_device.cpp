// Every kernel on a CUDA device against the same kernel on the CPU: small, and with no library but
// the CUDA runtime, so that compute-sanitizer goes through it in seconds (tools/gpu_check.sh).
#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "cpu/boundary_conv.hpp"
#include "cpu/convert.hpp"
#include "cpu/pack.hpp"
#include "cpu/pool.hpp"
#include "cpu/pool_max.hpp"
#include "cpu/uniform.hpp"
#include "cuda/kernels.hpp"
#include "kernels/dispatch.hpp"
#include "random_cases.hpp"

namespace pydist {
namespace {

using testing::Random;

constexpr int kSkipped = 77;
int passed = 0, failed = 0;

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

// An array on the host and, of exactly its size, on the device.
class Array {
 public:
  Array(Random& random, DType dtype, const Coords& shape, const Coords& strides)
      : memory_(static_cast<std::size_t>(volume_of(shape) * size_of(dtype))) {
    view_ = {memory_.data(), dtype, shape, strides, {}};
    kernels::dispatch(dtype, [&]<class T>(std::type_identity<T>) {
      T* const values = reinterpret_cast<T*>(memory_.data());
      for (index_t i = 0; i < view_.elements(); ++i) {
        if constexpr (requires { T::from(0.0f); }) {
          values[i] = T::from(static_cast<float>(random.value()));
        } else if constexpr (std::is_same_v<T, bool>) {
          values[i] = random.chance(0.5);
        } else {
          values[i] = static_cast<T>(random.value() * 8);
        }
      }
    });
    check(cudaMalloc(&device_, memory_.size()));
    check(cudaMemcpy(device_, memory_.data(), memory_.size(), cudaMemcpyHostToDevice));
  }
  Array(Random& random, DType dtype, const Coords& shape)
      : Array(random, dtype, shape, random.strides_for(shape)) {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { cudaFree(device_); }

  const TensorView& host() const { return view_; }
  TensorView device() const {
    TensorView view = view_;
    view.data = device_;
    view.device = {DeviceType::kCuda, 0};
    return view;
  }

  // Largest difference between host and device, by the largest value.
  double error() const {
    std::vector<std::byte> found(memory_.size());
    check(cudaMemcpy(found.data(), device_, found.size(), cudaMemcpyDeviceToHost));
    double worst = 0, largest = 1e-30;
    kernels::dispatch(view_.dtype, [&]<class T>(std::type_identity<T>) {
      const T* const expected = reinterpret_cast<const T*>(memory_.data());
      const T* const got = reinterpret_cast<const T*>(found.data());
      for (index_t i = 0; i < view_.elements(); ++i) {
        const auto a = static_cast<double>(kernels::load_as(expected[i]));
        const auto b = static_cast<double>(kernels::load_as(got[i]));
        largest = std::max(largest, std::abs(a));
        worst = a == b ? worst : std::max(worst, std::isnan(a - b) ? 1e300 : std::abs(a - b));
      }
    });
    return worst / largest;
  }

 private:
  std::vector<std::byte> memory_;
  TensorView view_;
  void* device_ = nullptr;
};

cuda::Queue queue;

// Compares what both have written, once the device is done.
void expect(const char* name, const Array& target, double tolerance) {
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

double tolerance_of(DType dtype) {
  if (dtype == DType::kFloat64) return 1e-13;
  if (dtype == DType::kFloat32) return 1e-5;
  return dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7;
}

constexpr DType kFloating[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

void packing(Random& random) {
  for (const DType dtype :
       {DType::kUInt8, DType::kInt16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    const Coords shape{2, 3, 7, 9, 35};
    Array view(random, dtype, shape);
    std::vector<Box> boxes;
    for (int i = 0; i < 3; ++i) boxes.push_back(random.box_in(shape));
    const kernels::Regions regions(boxes);
    const Coords row{regions.elements() + 1};  // an allocation of none is none
    Array buffer(random, dtype, row, Coords{1});
    cpu::pack(view.host(), regions, buffer.host());
    cuda::pack(view.device(), regions, buffer.device(), queue);
    expect("pack", buffer, 0);
    cpu::unpack_add(buffer.host(), regions, view.host());
    cuda::unpack_add(buffer.device(), regions, view.device(), queue);
    expect("unpack_add", view, dtype == DType::kBFloat16 ? 0x1p-7 : 0);
    cpu::unpack(buffer.host(), regions, view.host());
    cuda::unpack(buffer.device(), regions, view.device(), queue);
    expect("unpack", view, dtype == DType::kBFloat16 ? 0x1p-7 : 0);
  }
}

void convolution(Random& random) {
  for (const DType dtype : kFloating) {
    for (const index_t groups : {1, 2}) {
      Array in(random, dtype, {2, 4 * groups, 2, 9, 11}), out(random, dtype, {2, 6, 3, 9, 11});
      Array weight(random, dtype, {6, 4, 3, 3, 3});
      const kernels::ConvAttributes attributes{{-1, 0, 0}, {0, 0, 0}, {1, 1, 1},
                                               {1, 1, 1},  {1, 1, 1}, groups};
      const auto on_host = [&](double slope) {
        return kernels::conv_problem(in.host(), weight.host(), out.host(), attributes, slope);
      };
      const auto on_device = [&](double slope) {
        return kernels::conv_problem(in.device(), weight.device(), out.device(), attributes, slope);
      };
      const double tolerance = 4 * tolerance_of(dtype);
      cpu::boundary_conv_forward(on_host(0.01));
      cuda::boundary_conv_forward(on_device(0.01), std::nullopt, queue);
      expect("boundary_conv_forward", out, tolerance);
      cpu::boundary_conv_dgrad(on_host(1));
      cuda::boundary_conv_dgrad(on_device(1), std::nullopt, queue);
      expect("boundary_conv_dgrad", in, tolerance);
      cpu::boundary_conv_wgrad(on_host(1));
      cuda::boundary_conv_wgrad(on_device(1), std::nullopt, queue);
      expect("boundary_conv_wgrad", weight, tolerance);
    }
  }
}

void pooling(Random& random) {
  const std::vector<Footprint> windows(3, Footprint(3, 2, 1, 1, 1));
  for (const DType dtype : kFloating) {
    Array in(random, dtype, {2, 5, 9, 8, 21}), out(random, dtype, {2, 5, 5, 4, 11});
    Array taps(random, DType::kUInt8, {2, 5, 5, 4, 11});
    Array depth(random, DType::kFloat64, {5}), height(random, DType::kFloat64, {4}),
        width(random, DType::kFloat64, {11});
    const kernels::PoolAttributes attributes{{0, 0, 0}, {0, 0, 0}, windows};
    const auto sums = [&](bool host) {
      const auto scale = [&](const Array& array) {
        return static_cast<const double*>(host ? array.host().data : array.device().data);
      };
      return kernels::pool_problem(host ? in.host() : in.device(), host ? out.host() : out.device(),
                                   attributes, {scale(depth), scale(height), scale(width)}, false);
    };
    const auto maxima = [&](bool host) {
      return kernels::max_problem(host ? in.host() : in.device(), host ? out.host() : out.device(),
                                  host ? taps.host() : taps.device(), attributes, false);
    };
    const double tolerance = 4 * tolerance_of(dtype);
    cpu::pool_sum_forward(sums(true));
    cuda::pool_sum_forward(sums(false), queue);
    expect("pool_sum_forward", out, tolerance);
    cpu::pool_max_forward(maxima(true));
    cuda::pool_max_forward(maxima(false), queue);
    expect("pool_max_forward", out, 0);
    expect("pool_max_forward's taps", taps, 0);
    cpu::pool_max_pick(maxima(true));
    cuda::pool_max_pick(maxima(false), queue);
    expect("pool_max_pick", out, 0);
    cpu::pool_max_backward(maxima(true));
    cuda::pool_max_backward(maxima(false), queue);
    expect("pool_max_backward", in, tolerance);
    cpu::pool_sum_backward(sums(true));
    cuda::pool_sum_backward(sums(false), queue);
    expect("pool_sum_backward", in, tolerance);
  }
}

void numbers(Random& random) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    Array out(random, dtype, {3, 5, 70});
    Array key(random, DType::kInt64, {1});
    const Coords lo{1, 2, 3}, shape{9, 9, 99};
    cpu::keyed_uniform(out.host(), {.value = 7}, lo, shape);
    cuda::keyed_uniform(out.device(), {.value = 7}, lo, shape, queue);
    expect("keyed_uniform", out, 0);
    const auto at = [](const TensorView& view) {
      return kernels::UniformKey{.at = static_cast<const std::uint64_t*>(view.data)};
    };
    cpu::keyed_uniform(out.host(), at(key.host()), lo, shape);
    cuda::keyed_uniform(out.device(), at(key.device()), lo, shape, queue);
    expect("keyed_uniform by a key in memory", out, 0);
  }
}

void conversion(Random& random) {
  const Coords shape{2, 5, 7, 67}, one{1};
  for (const DType to : {DType::kFloat32, DType::kFloat64}) {
    Array found(random, DType::kInt32, one);
    for (const DType from : {DType::kUInt8, DType::kInt16}) {
      const index_t entries = index_t{1} << (8 * size_of(from));
      Array stored(random, from, shape), out(random, to, shape);
      Array table(random, to, {2, entries}, {entries, 1});
      cpu::look_up(stored.host(), table.host(), 3, out.host(), found.host());
      cuda::look_up(stored.device(), table.device(), 3, out.device(), found.device(), queue);
      expect("look_up", out, 0);
    }
    for (const DType from : {DType::kInt32, DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
      Array stored(random, from, shape), out(random, to, shape);
      Array maps(random, DType::kFloat64, {2, 4}, {4, 1});
      for (const bool log : {false, true}) {
        cpu::rescale(stored.host(), maps.host(), log, 3, out.host(), found.host());
        cuda::rescale(stored.device(), maps.device(), log, 3, out.device(), found.device(), queue);
        if (!log) expect("rescale", out, to == DType::kFloat32 ? 0x1p-22 : 1e-15);
      }
      expect("rescale's finding", found, 0);
    }
  }
}

}  // namespace
}  // namespace pydist

int main() {
  using namespace pydist;
  if (cuda::device_count() == 0) {
    std::puts("skipped: no CUDA device");
    return kSkipped;
  }
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  queue = {0, stream};
  Random random(1);
  for (const auto test : {packing, convolution, pooling, numbers, conversion}) test(random);
  check(cudaStreamDestroy(stream));
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
