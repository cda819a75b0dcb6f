// Words of 1 to 16 bytes, which a kernel moves by one load or store.
#pragma once

#include <cstdint>

namespace pydist::ops {

// A word of N bytes, aligned to N, that may alias any element type.
template <int N>
struct alignas(N) [[gnu::may_alias]] Word {
  std::uint32_t part[N / 4];
};
template <>
struct alignas(1) [[gnu::may_alias]] Word<1> {
  std::uint8_t part;
};
template <>
struct alignas(2) [[gnu::may_alias]] Word<2> {
  std::uint16_t part;
};

}  // namespace pydist::ops
