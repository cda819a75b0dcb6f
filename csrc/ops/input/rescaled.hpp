// Computes the input from a stored value: clip, log1p, shift, scale, divide.
//
// Compiled for every instruction set (see isa/tables.hpp): every function in here, and in what it
// includes, must be inlined.
#pragma once

#include <cstdint>

#include "launch/host_device.hpp"
#include "ops/common/half.hpp"

namespace pydist::ops {

// 1 for NaN and the infinities; tests the bits, so that no compiler option can drop the test.
PYDIST_HD std::uint32_t not_finite(float value) {
  return (bits_as<std::uint32_t>(value) & 0x7f800000u) == 0x7f800000u;
}
PYDIST_HD std::uint32_t not_finite(double value) {
  return (bits_as<std::uint64_t>(value) >> 52 & 0x7ffu) == 0x7ffu;
}

// log(1 + x) of a float, in double: within half a unit and 1e-8 of one, on the CPU and on devices.
//
// u = 1 + x is exact where |x| >= 2^-29; below that, x is the answer. u = 2^k m with m in [0.707,
// 1.414); log m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.1716: the series to s^13 leaves 2e-12.
// Free of branches and tables, so that loops over it vectorize.
PYDIST_HD float log1p_of(float value) {
  const double u = 1.0 + static_cast<double>(value);
  constexpr std::uint64_t kRootHalf = 0x3fe6a09e00000000u;
  const auto bits = bits_as<std::uint64_t>(u);
  const std::uint64_t exponent = (bits - kRootHalf + (std::uint64_t{1023} << 52)) >> 52;
  // Through the last bits of 2^52: few vector units convert 64-bit integers.
  const double k = bits_as<double>(exponent | 0x4330000000000000u) - (4503599627370496.0 + 1023.0);
  const double m = bits_as<double>(bits - ((exponent - 1023) << 52));
  const double s = (m - 1.0) / (m + 1.0), q = s * s;
  double series = 1.0 / 13;
  series = series * q + 1.0 / 11;
  series = series * q + 1.0 / 9;
  series = series * q + 1.0 / 7;
  series = series * q + 1.0 / 5;
  series = series * q + 1.0 / 3;
  series = series * q + 1.0;
  const auto result = static_cast<float>(k * 0.69314718055994531 + 2.0 * s * series);
  const std::uint32_t magnitude = bits_as<std::uint32_t>(value) & 0x7fffffffu;
  // Tiny numbers, infinity and NaN stay; -1 gives -infinity, what is below it NaN.
  const bool stays = (magnitude < 0x31000000u) | (value > __FLT_MAX__) | (value != value);
  const float below = bits_as<float>(value == -1.0f ? 0xff800000u : 0x7fc00000u);
  const float inside = value > -1.0f ? result : below;
  return stays ? value : inside;
}
PYDIST_HD double log1p_of(double value) {
#if defined(__CUDA_ARCH__)
  return ::log1p(value);
#else
  return __builtin_log1p(value);
#endif
}

// The map of a channel: clip to [lower, upper], log1p if wanted, subtract `shift`, divide by
// `scale`. Infinite bounds, a shift of 0 and a scale of 1 change nothing.
struct ChannelMap {
  double lower, upper, shift, scale;

  // Whether the map does more than the logarithm.
  PYDIST_HD bool moves() const {
    return lower != -__builtin_inf() || upper != __builtin_inf() || shift != 0 || scale != 1;
  }
};

// (L(clip(from)) - shift) / scale / divisor, L log1p or the identity. Every operation is done in
// double and rounded to the input's type, as NumPy does it.
template <class To, bool kLog, bool kMoves, class From>
PYDIST_HD To rescaled(const From& from, const ChannelMap& map, To divisor) {
  To value = static_cast<To>(load_as(from));
  if constexpr (kMoves) {
    const double x = value;
    const double above = x < map.lower ? map.lower : x;
    value = static_cast<To>(above > map.upper ? map.upper : above);
  }
  if constexpr (kLog) value = log1p_of(value);
  if constexpr (kMoves) {
    value = static_cast<To>(static_cast<double>(value) - map.shift);
    value = static_cast<To>(static_cast<double>(value) / map.scale);
  }
  return value / divisor;
}

}  // namespace pydist::ops
