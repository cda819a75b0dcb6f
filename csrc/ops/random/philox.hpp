// Philox4x32-10: random numbers as a function of (key, counter), no state.
//
// Ten rounds of two 32 x 32 -> 64 bit products; the key is incremented by the golden ratio and
// sqrt(3) - 1.
// Proof: tests/native/test_random.cpp has the vectors of Random123.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include <cstdint>

#include "launch/host_device.hpp"

namespace pydist::ops {

struct Philox4 {
  std::uint32_t word0, word1, word2, word3;
};

PYDIST_HD Philox4 philox4x32_10(Philox4 counter, std::uint32_t key0, std::uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * counter.word0;
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * counter.word2;
    counter.word0 = static_cast<std::uint32_t>(product1 >> 32) ^ counter.word1 ^ key0;
    counter.word1 = static_cast<std::uint32_t>(product1);
    counter.word2 = static_cast<std::uint32_t>(product0 >> 32) ^ counter.word3 ^ key1;
    counter.word3 = static_cast<std::uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// U[0, 1) for a counter: the upper 24 (fp32) or 53 (fp64) bits of the first words, so that every
// value is exact and 1 never occurs. The counter's upper half is 0, and two or three of the four
// words are dropped: an element's number does not depend on its neighbors.
template <class T>
PYDIST_HD T uniform(std::uint64_t key, std::uint64_t counter) {
  const Philox4 random = philox4x32_10(
      {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 0, 0},
      static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32));
  if constexpr (sizeof(T) == 4) {
    return static_cast<T>(static_cast<std::int32_t>(random.word0 >> 8)) * T{0x1p-24};
  } else {
    const std::uint64_t bits = std::uint64_t{random.word1} << 32 | random.word0;
    return static_cast<T>(static_cast<std::int64_t>(bits >> 11)) * T{0x1p-53};
  }
}

}  // namespace pydist::ops
