// CRC-32C by the CPU's instruction if it has one, else by tables, eight bytes at a time.
#include "io/crc32c.hpp"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace pydist::io {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected 0x1EDC6F41
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b]: effect of byte b followed by k zero bytes ("slicing by 8", Kounavis & Berry 2005).
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t previous = tables[k - 1][byte];
      tables[k][byte] = (previous >> 8) ^ tables[0][previous & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint64_t load_little_endian(const unsigned char* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
  return word;
}

std::uint32_t portable(const unsigned char* bytes, std::size_t size, std::uint32_t crc) {
  for (; size >= 8; bytes += 8, size -= 8) {
    const std::uint64_t word = load_little_endian(bytes) ^ crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; size > 0; ++bytes, --size) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 0xFF];
  return crc;
}

#if defined(__x86_64__)
// The effect of a number of zero bytes on a CRC. It is linear in the bits: a table per byte of it.
class Zeros {
 public:
  explicit Zeros(std::size_t size) {
    for (std::size_t bit = 0; bit < 32; ++bit) {
      std::uint32_t crc = std::uint32_t{1} << bit;
      for (std::size_t i = 0; i < size; ++i) crc = (crc >> 8) ^ kTables[0][crc & 0xFF];
      for (std::size_t byte = 0; byte < 256; ++byte) {
        if ((byte >> (bit % 8)) & 1) tables_[bit / 8][byte] ^= crc;
      }
    }
  }

  std::uint32_t after(std::uint32_t crc) const {
    return tables_[0][crc & 0xFF] ^ tables_[1][(crc >> 8) & 0xFF] ^ tables_[2][(crc >> 16) & 0xFF] ^
           tables_[3][crc >> 24];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> tables_{};
};

constexpr std::size_t kLane = 1024;

// Three lanes at a time, as the instruction takes three cycles and one can start in each: the CRC
// of A followed by B is the checksum of A followed by zeros, plus the checksum of B from 0.
__attribute__((target("sse4.2"))) std::uint32_t sse42(const unsigned char* bytes, std::size_t size,
                                                      std::uint32_t crc) {
  static const Zeros lane(kLane);
  for (; size >= 3 * kLane; bytes += 3 * kLane, size -= 3 * kLane) {
    std::uint64_t first = crc, second = 0, third = 0;
    for (std::size_t i = 0; i < kLane; i += 8) {
      first = _mm_crc32_u64(first, load_little_endian(bytes + i));
      second = _mm_crc32_u64(second, load_little_endian(bytes + kLane + i));
      third = _mm_crc32_u64(third, load_little_endian(bytes + 2 * kLane + i));
    }
    crc = lane.after(static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second);
    crc = lane.after(crc) ^ static_cast<std::uint32_t>(third);
  }
  std::uint64_t wide = crc;
  for (; size >= 8; bytes += 8, size -= 8) wide = _mm_crc32_u64(wide, load_little_endian(bytes));
  crc = static_cast<std::uint32_t>(wide);
  for (; size > 0; ++bytes, --size) crc = _mm_crc32_u8(crc, *bytes);
  return crc;
}
#endif

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t crc) {
  return ~portable(static_cast<const unsigned char*>(data), size, ~crc);
}

std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return ~sse42(static_cast<const unsigned char*>(data), size, ~crc);
#endif
  return crc32c_portable(data, size, crc);
}

}  // namespace pydist::io
