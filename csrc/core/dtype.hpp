// Element types of the kernels. The C++ types of half precision are in ops/common/half.hpp, and
// ops/common/dispatch.hpp maps a DType to a C++ type.
//
// Complex numbers, quantized types, 8-bit floats and unsigned integers above 8 bits are none of
// them: bindings/tensor_border.hpp refuses such tensors, so kernels never see them.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/errors.hpp"

namespace pydist {

// Ordered by kind: bool, integers, floating-point types. is_floating depends on that order. The
// numbers stay within a process: names (name_of) cross the border to Python.
enum class DType : std::uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};

// Bytes of one element, also of a bool. 0 for a value outside of the enum, which only memory errors
// and wrong casts can produce.
constexpr int size_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
      return 1;
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

// The name in torch, without its prefix `torch.`, and in NumPy, which has all of them but bfloat16.
// Bindings compare it with the names that Python passes, and messages contain it.
constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return "bool";
    case DType::kUInt8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kInt16:
      return "int16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
  }
  return "unknown";
}

// The floating-point types are the last ones of the enum.
constexpr bool is_floating(DType dtype) { return dtype >= DType::kFloat16; }

}  // namespace pydist
