// CRC-32C by carry-less products of 512 bits, else by the CPU's instruction, else by tables.
#include "io/crc32c.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pydist::io {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;            // reflected 0x1EDC6F41
constexpr std::size_t kCopiedPiece = std::size_t{16} << 10;  // stays in a CPU's first cache
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

// x^n modulo the polynomial, in the order of bits of a CRC.
constexpr std::uint32_t power_of_x(unsigned n) {
  std::uint32_t power = std::uint32_t{1} << 31;
  for (; n > 0; --n) power = (power >> 1) ^ ((power & 1) ? kPolynomial : 0);
  return power;
}

// The factors that move 16 bytes by a number of bytes towards the end ("Fast CRC Computation for
// Generic Polynomials Using PCLMULQDQ", Gopal et al., Intel 2009): of the first 8 and the last 8.
// A product of reflected numbers comes out shifted by one bit, hence 31 and 33.
template <unsigned kBytes>
struct Moved {
  static constexpr long long kFirst = power_of_x(8 * kBytes + 31),
                             kLast = power_of_x(8 * kBytes - 33);
};

#define PYDIST_FOLDING __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

PYDIST_FOLDING inline __m512i products(__m512i value, __m512i factors) {
  return _mm512_xor_si512(_mm512_clmulepi64_epi128(value, factors, 0x00),
                          _mm512_clmulepi64_epi128(value, factors, 0x11));
}

template <unsigned kBytes>
PYDIST_FOLDING __m512i add_moved(__m512i value, __m512i next) {
  using Factors = Moved<kBytes>;
  const __m512i factors =
      _mm512_set_epi64(Factors::kLast, Factors::kFirst, Factors::kLast, Factors::kFirst,
                       Factors::kLast, Factors::kFirst, Factors::kLast, Factors::kFirst);
  return _mm512_xor_si512(products(value, factors), next);
}

constexpr std::size_t kVector = 64, kBlock = 4 * kVector;

// Folds the bytes, at least `kBlock`, onto the last 16 of them. Four vectors at a time, as a
// product takes several cycles and one can start in each.
PYDIST_FOLDING std::uint32_t folded(const unsigned char* bytes, std::size_t size,
                                    std::uint32_t crc) {
  __m512i sums[4];
  for (std::size_t i = 0; i < 4; ++i) sums[i] = _mm512_loadu_si512(bytes + i * kVector);
  sums[0] =
      _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  for (bytes += kBlock, size -= kBlock; size >= kBlock; bytes += kBlock, size -= kBlock) {
    for (std::size_t i = 0; i < 4; ++i) {
      sums[i] = add_moved<kBlock>(sums[i], _mm512_loadu_si512(bytes + i * kVector));
    }
  }
  __m512i sum = sums[0];
  for (std::size_t i = 1; i < 4; ++i) sum = add_moved<kVector>(sum, sums[i]);
  for (; size >= kVector; bytes += kVector, size -= kVector) {
    sum = add_moved<kVector>(sum, _mm512_loadu_si512(bytes));
  }
  const __m512i moved =
      products(sum, _mm512_set_epi64(0, 0, Moved<16>::kLast, Moved<16>::kFirst, Moved<32>::kLast,
                                     Moved<32>::kFirst, Moved<48>::kLast, Moved<48>::kFirst));
  std::uint64_t words[8];
  _mm512_storeu_si512(words, _mm512_mask_xor_epi64(moved, 0xC0, moved, sum));
  const std::uint64_t first = words[0] ^ words[2] ^ words[4] ^ words[6];
  const std::uint64_t second = words[1] ^ words[3] ^ words[5] ^ words[7];
  crc = static_cast<std::uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, first), second));
  return sse42(bytes, size, crc);
}

#define PYDIST_COPYING __attribute__((target("avx2,vpclmulqdq,pclmul,sse4.2")))

template <unsigned kBytes>
PYDIST_COPYING inline __m256i add_moved(__m256i value, __m256i next) {
  using Factors = Moved<kBytes>;
  const __m256i factors =
      _mm256_set_epi64x(Factors::kLast, Factors::kFirst, Factors::kLast, Factors::kFirst);
  const __m256i products = _mm256_xor_si256(_mm256_clmulepi64_epi128(value, factors, 0x00),
                                            _mm256_clmulepi64_epi128(value, factors, 0x11));
  return _mm256_xor_si256(products, next);
}

// Loads a vector, and stores it at `to` past the caches, for which no line has to be loaded.
PYDIST_COPYING inline __m256i copied(unsigned char* to, const unsigned char* from) {
  const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), value);
  return value;
}

constexpr std::size_t kHalf = 32, kCopied = 4 * kHalf;

// Copies a multiple of `kCopied` bytes, not 0, and folds them. `to` is aligned to `kHalf`.
PYDIST_COPYING std::uint32_t copied_folded(unsigned char* to, const unsigned char* from,
                                           std::size_t size, std::uint32_t crc) {
  __m256i sums[4];
  for (std::size_t i = 0; i < 4; ++i) sums[i] = copied(to + i * kHalf, from + i * kHalf);
  sums[0] =
      _mm256_xor_si256(sums[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(crc))));
  for (std::size_t done = kCopied; done < size; done += kCopied) {
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t at = done + i * kHalf;
      sums[i] = add_moved<kCopied>(sums[i], copied(to + at, from + at));
    }
  }
  _mm_sfence();
  __m256i sum = sums[0];
  for (std::size_t i = 1; i < 4; ++i) sum = add_moved<kHalf>(sum, sums[i]);
  const __m128i first = _mm256_castsi256_si128(sum), last = _mm256_extracti128_si256(sum, 1);
  const __m128i factors = _mm_set_epi64x(Moved<16>::kLast, Moved<16>::kFirst);
  const __m128i folded = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(first, factors, 0x00),
                                                     _mm_clmulepi64_si128(first, factors, 0x11)),
                                       last);
  std::uint64_t words[2];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(words), folded);
  return static_cast<std::uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, words[0]), words[1]));
}

bool can_fold_copies() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
}

bool can_fold() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
}
#endif

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t crc) {
  return ~portable(static_cast<const unsigned char*>(data), size, ~crc);
}

std::uint32_t crc32c_by_instruction(const void* data, std::size_t size, std::uint32_t crc) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return ~sse42(static_cast<const unsigned char*>(data), size, ~crc);
#endif
  return crc32c_portable(data, size, crc);
}

std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc) {
#if defined(__x86_64__)
  static const bool folds = can_fold();
  if (folds && size >= kBlock) return ~folded(static_cast<const unsigned char*>(data), size, ~crc);
#endif
  return crc32c_by_instruction(data, size, crc);
}

std::uint32_t crc32c_copy(void* to, const void* from, std::size_t size, std::uint32_t crc) {
  auto* target = static_cast<unsigned char*>(to);
  const auto* source = static_cast<const unsigned char*>(from);
  const auto copy = [&](std::size_t bytes) {
    std::memcpy(target, source, bytes);
    crc = crc32c(target, bytes, crc);
    target += bytes, source += bytes, size -= bytes;
  };
#if defined(__x86_64__)
  static const bool folds = can_fold_copies();
  if (folds && size >= 2 * kCopied) {
    copy((0 - reinterpret_cast<std::uintptr_t>(target)) % kHalf);
    const std::size_t bytes = size / kCopied * kCopied;
    crc = ~copied_folded(target, source, bytes, ~crc);
    target += bytes, source += bytes, size -= bytes;
  }
#endif
  while (size > 0) copy(std::min(size, kCopiedPiece));
  return crc;
}

}  // namespace pydist::io
