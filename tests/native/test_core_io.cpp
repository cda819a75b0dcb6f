// CRC-32C against the check values of RFC 3720, and its implementations against each other; reads
// of boxes against a loop over their elements.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <vector>

#include "io/box_read.hpp"
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

TEST(Crc32c, AllPathsAgreeAtEveryLengthAndOffset) {
  std::vector<unsigned char> bytes(700);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * 37 + 11);
  for (std::size_t offset = 0; offset < 9; ++offset) {
    for (std::size_t size = 0; size + offset <= bytes.size(); ++size) {
      const unsigned char* start = bytes.data() + offset;
      ASSERT_EQ(crc32c(start, size, 7), crc32c_portable(start, size, 7));
      ASSERT_EQ(crc32c_by_instruction(start, size, 7), crc32c_portable(start, size, 7));
    }
  }
}

TEST(Crc32c, SeveralLanesAtATimeAreThoseOfOne) {
  std::vector<unsigned char> bytes(10'000);
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<unsigned char>(i * i + i / 7);
  for (const std::size_t size : {3071u, 3072u, 3073u, 6143u, 6144u, 9216u, 9999u}) {
    const std::uint32_t expected = crc32c_portable(bytes.data() + 1, size);
    ASSERT_EQ(crc32c(bytes.data() + 1, size), expected) << size;
    ASSERT_EQ(crc32c_by_instruction(bytes.data() + 1, size), expected) << size;
  }
}

TEST(Crc32c, CopiesAtEveryLengthAndOffset) {
  std::vector<unsigned char> bytes(700), copy(800);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * 37 + 11);
  for (std::size_t offset = 0; offset < 40; ++offset) {
    for (std::size_t size = 0; size + 9 <= bytes.size(); ++size) {
      std::fill(copy.begin(), copy.end(), 0xA5);
      const unsigned char* start = bytes.data() + offset % 9;
      ASSERT_EQ(crc32c_copy(copy.data() + offset, start, size, 7), crc32c_portable(start, size, 7));
      ASSERT_TRUE(std::equal(start, start + size, copy.data() + offset));
      ASSERT_TRUE(std::all_of(copy.data(), copy.data() + offset, [](int b) { return b == 0xA5; }));
      ASSERT_TRUE(std::all_of(copy.data() + offset + size, copy.data() + copy.size(),
                              [](int b) { return b == 0xA5; }));
    }
  }
}

TEST(Crc32c, ContinuesOverPieces) {
  constexpr std::string_view digits = "123456789";
  for (std::size_t cut = 0; cut <= digits.size(); ++cut) {
    const std::uint32_t first = crc32c(digits.data(), cut);
    EXPECT_EQ(crc32c(digits.data() + cut, digits.size() - cut, first), 0xE3069283u);
  }
}

// An array of 4 x 3 x 5 numbers of two bytes, in a file from byte 6 on.
class BoxRead : public testing::Test {
 protected:
  using Place = std::array<std::int64_t, 3>;
  static constexpr Place kShape = {4, 3, 5};

  BoxRead() {
    std::fwrite("header", 1, 6, file_.get());
    for (std::uint16_t i = 0; i < 60; ++i) std::fwrite(&i, 2, 1, file_.get());
    std::fflush(file_.get());
  }

  std::vector<std::uint16_t> read(Place lo, Place hi, std::size_t count, Place shape = kShape) {
    std::vector<std::uint16_t> out(count);
    const FileArray array{::fileno(file_.get()), 6, 2, shape};
    read_box(array, lo, hi, std::as_writable_bytes(std::span(out)));
    return out;
  }

  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_{std::tmpfile(), &std::fclose};
};

TEST_F(BoxRead, EveryBoxHasItsElements) {
  const auto ends = [](std::int64_t extent) {
    std::vector<std::array<std::int64_t, 2>> found;
    for (std::int64_t lo = 0; lo <= extent; ++lo)
      for (std::int64_t hi = lo; hi <= extent; ++hi) found.push_back({lo, hi});
    return found;
  };
  for (const auto& [lo0, hi0] : ends(4)) {
    for (const auto& [lo1, hi1] : ends(3)) {
      for (const auto& [lo2, hi2] : ends(5)) {
        std::vector<std::uint16_t> expected;
        for (std::int64_t i = lo0; i < hi0; ++i)
          for (std::int64_t j = lo1; j < hi1; ++j)
            for (std::int64_t k = lo2; k < hi2; ++k)
              expected.push_back(static_cast<std::uint16_t>((i * 3 + j) * 5 + k));
        ASSERT_EQ(read({lo0, lo1, lo2}, {hi0, hi1, hi2}, expected.size()), expected);
      }
    }
  }
}

TEST_F(BoxRead, RefusesBoxesOutsideAndArraysBeyondTheFile) {
  EXPECT_THROW(read({0, 0, 0}, {5, 3, 5}, 75), std::invalid_argument);
  EXPECT_THROW(read({-1, 0, 0}, {1, 3, 5}, 30), std::invalid_argument);
  EXPECT_THROW(read({2, 0, 0}, {1, 3, 5}, 0), std::invalid_argument);
  EXPECT_THROW(read({0, 0, 0}, {4, 3, 5}, 59), std::invalid_argument);
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max() / 4;
  EXPECT_THROW(read({0, 0, 0}, {1, 1, 1}, 1, {kHuge, 3, 5}), std::invalid_argument);
  try {
    read({4, 0, 0}, {5, 3, 5}, 15, {5, 3, 5});
    FAIL() << "it read beyond the end";
  } catch (const std::system_error& error) {
    EXPECT_FALSE(error.code());
  }
  std::vector<std::uint16_t> out(60);
  const FileArray closed{-1, 0, 2, kShape};
  EXPECT_THROW(read_box(closed, Place{0, 0, 0}, kShape, std::as_writable_bytes(std::span(out))),
               std::system_error);
}

}  // namespace
}  // namespace pydist::io
