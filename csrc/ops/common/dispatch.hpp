// Dispatches a dtype known at run time to a type known at compile time.
//
// Each kernel is compiled once per type that it is dispatched to, so the number of instances of one
// call is the product over its dispatches: floating-point kernels have 4 instances, copies do not
// dispatch (they move words, see ops/common/word.hpp).
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "core/dtype.hpp"
#include "ops/common/half.hpp"

namespace pydist::ops {

// Calls f(std::type_identity<T>) with the C++ type of `dtype`.
template <class F>
void dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBool:
      return f(std::type_identity<bool>{});
    case DType::kUInt8:
      return f(std::type_identity<std::uint8_t>{});
    case DType::kInt8:
      return f(std::type_identity<std::int8_t>{});
    case DType::kInt16:
      return f(std::type_identity<std::int16_t>{});
    case DType::kInt32:
      return f(std::type_identity<std::int32_t>{});
    case DType::kInt64:
      return f(std::type_identity<std::int64_t>{});
    case DType::kFloat16:
      return f(std::type_identity<Float16>{});
    case DType::kBFloat16:
      return f(std::type_identity<BFloat16>{});
    case DType::kFloat32:
      return f(std::type_identity<float>{});
    case DType::kFloat64:
      return f(std::type_identity<double>{});
  }
  throw InternalError("dtype " + std::to_string(static_cast<int>(dtype)));
}

// Dispatches the floating-point types; others must have been refused before.
template <class F>
void dispatch_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(std::type_identity<Float16>{});
    case DType::kBFloat16:
      return f(std::type_identity<BFloat16>{});
    case DType::kFloat32:
      return f(std::type_identity<float>{});
    case DType::kFloat64:
      return f(std::type_identity<double>{});
    default:
      throw InternalError("no floating-point dtype: " + std::string(name_of(dtype)));
  }
}

}  // namespace pydist::ops
