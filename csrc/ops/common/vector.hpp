// Adjacent elements that a lane of a device loads, computes and stores together.
//
// A lane that moves one 2-byte element at a time is bound by its instructions: index arithmetic and
// accesses cost as much as for a word of 16 bytes. Bodies are templates over the number of elements
// N, and the launch picks N once: a word's if all arrays allow it (VectorFit), else 1.
// Proof: the kernels that use it are compared with plain loops, with and without vectors.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/index.hpp"
#include "launch/host_device.hpp"
#include "ops/common/half.hpp"
#include "ops/common/word.hpp"

namespace pydist::ops {

inline constexpr int kVectorBytes = 16;  // the longest access of a lane

// Elements of T in one access.
template <class T>
inline constexpr int kVectorElements = kVectorBytes / static_cast<int>(sizeof(T));

// N adjacent elements. In memory they are aligned to their size, or to kVectorBytes if they are
// longer, and each access has that size.
template <class T, int N>
struct Vector {
  T element[N];

  static PYDIST_HD Vector load(const T* from) {
    return bits_as<Vector>(*reinterpret_cast<const Words*>(from));
  }
  PYDIST_HD void store(T* to) const { *reinterpret_cast<Words*>(to) = bits_as<Words>(*this); }

 private:
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kWord = kBytes < kVectorBytes ? kBytes : kVectorBytes;
  struct [[gnu::may_alias]] Words {
    Word<kWord> word[kBytes / kWord];
  };
};

// Whether arrays can be accessed as vectors of `elements`.
struct VectorFit {
  int elements;
  bool fits = true;

  // An index of an element, an extent or a stride.
  VectorFit& multiple(index_t count) {
    fits = fits && count % elements == 0;
    return *this;
  }
  // The first element of an array whose elements have `size` bytes; null is no array.
  VectorFit& address(const void* data, index_t size) {
    const auto bytes =
        static_cast<std::uintptr_t>(std::min<index_t>(elements * size, kVectorBytes));
    fits = fits && reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
    return *this;
  }
};

}  // namespace pydist::ops
