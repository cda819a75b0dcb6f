// Division by a product and a shift: a device's own division takes dozens of instructions.
//
// Proof: the kernels that use it are compared with plain loops, which divide.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <string>

#include "core/errors.hpp"
#include "core/index.hpp"
#include "launch/host_device.hpp"

namespace pydist::ops {

// Division by a number that is known at launch (Granlund and Montgomery 1994), exact for
// 0 <= n < 2^31.
//
// With l = ceil(log2 d): multiplier = floor(2^(31 + l) / d) + 1, which fits into 32 bits, and
// n / d = n * multiplier >> (31 + l).
struct Divisor {
  std::uint32_t multiplier;
  std::int32_t shift, divisor;

  static Divisor by(index_t divisor) {
    PYDIST_EXPECT(
        divisor >= 1 && divisor <= std::numeric_limits<std::int32_t>::max(),
        "an extent of " + std::to_string(divisor) + "; a device counts from 1 to 2^31 - 1");
    const auto d = static_cast<std::uint32_t>(divisor);
    const int bits = std::bit_width(d - 1);
    return {static_cast<std::uint32_t>((std::uint64_t{1} << (31 + bits)) / d + 1), 31 + bits,
            static_cast<std::int32_t>(divisor)};
  }
  PYDIST_HD std::int32_t quotient(std::int32_t n) const {
    return static_cast<std::int32_t>((std::uint64_t{static_cast<std::uint32_t>(n)} * multiplier) >>
                                     shift);
  }
};

}  // namespace pydist::ops
