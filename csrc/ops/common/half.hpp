// float16 and bfloat16 as storage types: arithmetic is in float, as in torch on a device.
//
// Kernels are templates over the storage type `T`. They read with load_as<T>, compute in
// accumulator_t<T> (float for both half types) and write with store_as<T>, which rounds once.
// Proof: tests/native/test_half.cpp goes through all 65536 patterns of both types.
#pragma once

#include <cstdint>

#include "launch/host_device.hpp"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace pydist::ops {

// std::bit_cast that is always inlined, also without optimization (see PYDIST_HD).
template <class To, class From>
PYDIST_HD To bits_as(From value) {
  return __builtin_bit_cast(To, value);
}

// bfloat16: the upper half of a float. Rounds to nearest even; every NaN becomes the quiet one.
//
// Rounding: adding 0x7fff, and 1 more where the kept part is odd, carries into the kept part
// exactly where the dropped 16 bits are above a half, or equal to a half and the kept part is odd.
struct BFloat16 {
  std::uint16_t bits;

  static PYDIST_HD BFloat16 from(float value) {
    const auto word = bits_as<std::uint32_t>(value);
    const std::uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<std::uint16_t>(is_nan ? 0x7fc0u : rounded)};
  }
  PYDIST_HD float to_float() const {
    return bits_as<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

// IEEE 754 binary16. The host conversions are free of branches, so that loops over them vectorize;
// the method is Fabian Giesen's (float addition does the shifting of subnormals and the rounding).
// Exponent biases: 127 in a float, 15 in a half. 0x38000000 is (127 - 15) << 23; 0x38800000 is
// 2^-14, the smallest normal half; 0x477ff000 is 65520, from where on results round to infinity.
struct Float16 {
  std::uint16_t bits;

  static PYDIST_HD Float16 from(float value) {
#if defined(__CUDA_ARCH__)
    return {__half_as_ushort(__float2half_rn(value))};
#else
    const auto word = bits_as<std::uint32_t>(value);
    const std::uint32_t sign = word & 0x80000000u;
    const std::uint32_t magnitude = word ^ sign;
    // Subnormal results: adding 0.5, whose last bit is 2^-24 as a half's, leaves the rounded
    // mantissa in the lowest bits.
    const std::uint32_t tiny =
        bits_as<std::uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
    // Normal results: the exponent's bias changes, and 13 bits are rounded away, ties to even.
    const std::uint32_t odd = (magnitude >> 13) & 1u;
    const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + odd) >> 13;
    const std::uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const std::uint32_t finite = magnitude < 0x38800000u ? tiny : normal;
    const std::uint32_t half = magnitude >= 0x477ff000u ? special : finite;
    return {static_cast<std::uint16_t>(half | (sign >> 16))};
#endif
  }
  PYDIST_HD float to_float() const {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(bits));
#else
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fffu) << 13;
    const std::uint32_t exponent = magnitude & 0x0f800000u;
    // 2^-14 (1 + m) - 2^-14 is exact, and normalizes a subnormal half's mantissa m.
    const float subnormal = bits_as<float>(magnitude + 0x38800000u) - bits_as<float>(0x38800000u);
    const std::uint32_t rebias = exponent == 0x0f800000u ? 0x70000000u : 0x38000000u;
    const std::uint32_t word =
        exponent == 0 ? bits_as<std::uint32_t>(subnormal) : magnitude + rebias;
    return bits_as<float>(word | sign);
#endif
  }
};

// The accumulator type of T.
template <class T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<Float16> {
  using type = float;
};
template <>
struct Accumulator<BFloat16> {
  using type = float;
};
template <class T>
using accumulator_t = typename Accumulator<T>::type;

// Conversions to and from the accumulator type.
template <class T>
PYDIST_HD accumulator_t<T> load_as(const T& value) {
  if constexpr (requires { value.to_float(); }) {
    return value.to_float();
  } else {
    return value;
  }
}
template <class T>
PYDIST_HD T store_as(accumulator_t<T> value) {
  if constexpr (requires { T::from(value); }) {
    return T::from(value);
  } else {
    return value;
  }
}

}  // namespace pydist::ops
