// CRC-32C by the CPU's instruction where there is one, else by tables, eight bytes at a time.
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
__attribute__((target("sse4.2"))) std::uint32_t sse42(const unsigned char* bytes, std::size_t size,
                                                      std::uint32_t crc) {
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
