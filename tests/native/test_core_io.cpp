// CRC-32C against the check values of RFC 3720, and both implementations against each other.
#include <gtest/gtest.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "io/crc32c.hpp"

namespace pydist::io {
namespace {

TEST(Crc32c, MatchesPublishedValues) {
  constexpr std::string_view digits = "123456789";
  EXPECT_EQ(crc32c(digits.data(), digits.size()), 0xE3069283u);
  EXPECT_EQ(crc32c_portable(digits.data(), digits.size()), 0xE3069283u);
  const std::vector<unsigned char> zeros(32, 0), ones(32, 0xFF);
  EXPECT_EQ(crc32c(zeros.data(), zeros.size()), 0x8A9136AAu);
  EXPECT_EQ(crc32c(ones.data(), ones.size()), 0x62A8AB43u);
  EXPECT_EQ(crc32c(nullptr, 0), 0u);
}

TEST(Crc32c, PortableAndHardwareAgreeAtEveryLengthAndOffset) {
  std::vector<unsigned char> bytes(100);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * 37 + 11);
  for (std::size_t offset = 0; offset < 9; ++offset) {
    for (std::size_t size = 0; size + offset <= bytes.size(); ++size) {
      ASSERT_EQ(crc32c(bytes.data() + offset, size), crc32c_portable(bytes.data() + offset, size));
    }
  }
}

TEST(Crc32c, ThreeLanesAtATimeAreThoseOfOne) {
  std::vector<unsigned char> bytes(10'000);
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<unsigned char>(i * i + i / 7);
  for (const std::size_t size : {3071u, 3072u, 3073u, 6143u, 6144u, 9216u, 9999u}) {
    ASSERT_EQ(crc32c(bytes.data() + 1, size), crc32c_portable(bytes.data() + 1, size)) << size;
  }
}

TEST(Crc32c, ContinuesOverPieces) {
  constexpr std::string_view digits = "123456789";
  for (std::size_t cut = 0; cut <= digits.size(); ++cut) {
    const std::uint32_t first = crc32c(digits.data(), cut);
    EXPECT_EQ(crc32c(digits.data() + cut, digits.size() - cut, first), 0xE3069283u);
  }
}

}  // namespace
}  // namespace pydist::io
