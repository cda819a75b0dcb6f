// TensorView: borrowed memory as a strided array.
//
// Element i is data[sum_d i_d * strides[d]]. Strides may be 0 (an expanded dim; bindings refuse to
// write to it) or negative, and need not be in the order of the dims: channels-last is only an
// order of memory.
#pragma once

#include <string>

#include "core/dtype.hpp"
#include "core/index.hpp"

namespace pydist {

enum class DeviceType : std::uint8_t { kCpu, kCuda };

// `index` is CUDA's number of the device in this process (CUDA_VISIBLE_DEVICES renumbers them), and
// 0 for the CPU.
struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu" or "cuda:0", as in torch.
inline std::string to_string(Device device) {
  if (device.type == DeviceType::kCpu) return "cpu";
  return "cuda:" + std::to_string(device.index);
}

// Valid only while its owner is alive: made for each call, never kept. `data` points to the
// element with all indices 0 and may be null if there is no element. Strides count elements.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Coords shape;
  Coords strides;
  Device device;

  int ndim() const { return shape.ndim(); }
  index_t elements() const { return volume_of(shape); }
  // Bytes of all elements, without gaps that strides may leave between them.
  index_t bytes() const { return checked_mul(elements(), size_of(dtype)); }

  // Whether the elements are stored in C order without gaps. The stride of a dim with one index
  // does not matter, and a view without elements is contiguous.
  bool contiguous() const {
    if (elements() == 0) return true;
    index_t expected = 1;
    for (int dim = ndim() - 1; dim >= 0; --dim) {
      if (shape[dim] != 1 && strides[dim] != expected) return false;
      expected *= shape[dim];
    }
    return true;
  }
};

}  // namespace pydist
