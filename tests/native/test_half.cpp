// Half precision: every bit pattern, and rounding to nearest even.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "ops/common/half.hpp"

namespace pydist {
namespace {

TEST(Half, RoundTripsEveryFiniteValue) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const ops::Float16 half{static_cast<std::uint16_t>(bits)};
    const ops::BFloat16 brain{static_cast<std::uint16_t>(bits)};
    if (!std::isnan(half.to_float())) {
      ASSERT_EQ(ops::Float16::from(half.to_float()).bits, bits);
    }
    if (!std::isnan(brain.to_float())) {
      ASSERT_EQ(ops::BFloat16::from(brain.to_float()).bits, bits);
    }
  }
  EXPECT_TRUE(std::isnan(ops::Float16::from(std::nanf("")).to_float()));
  EXPECT_TRUE(std::isnan(ops::BFloat16::from(std::nanf("")).to_float()));
}

TEST(Half, RoundsToNearestEven) {
  EXPECT_EQ(ops::Float16::from(1.0f + 0x1p-11f).to_float(), 1.0f);
  EXPECT_EQ(ops::Float16::from(1.0f + 0x3p-11f).to_float(), 1.0f + 0x1p-9f);
  EXPECT_EQ(ops::Float16::from(65519.0f).to_float(), 65504.0f);
  EXPECT_TRUE(std::isinf(ops::Float16::from(65520.0f).to_float()));
  EXPECT_EQ(ops::Float16::from(0x1p-25f).to_float(), 0.0f);
  EXPECT_EQ(ops::Float16::from(0x1.8p-25f).to_float(), 0x1p-24f);
  EXPECT_EQ(ops::BFloat16::from(1.0f + 0x1p-8f).to_float(), 1.0f);
  EXPECT_EQ(ops::BFloat16::from(1.0f + 0x3p-8f).to_float(), 1.0f + 0x1p-6f);
}

}  // namespace
}  // namespace pydist
