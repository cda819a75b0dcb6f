// Adjacent elements that a lane of a device loads, computes and stores together.
//
// A lane that moves one 2-byte element at a time is bound by its instructions: index arithmetic and
// accesses cost as much as for a word of 16 bytes. Bodies are templates over the number of elements
// N, and the launch picks N once: a word's if all arrays allow it (VectorFit), else 1.
// Proof: the kernels that use it are compared with plain loops, with and without vectors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

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
// longer, and each access has that size. One element is accessed as such: a compiler for the host
// vectorizes loops over it.
template <class T, int N>
struct Vector {
  T element[N];

  static PYDIST_HD Vector load(const T* from) {
    if constexpr (N == 1) {
      return {*from};
    } else {
      return bits_as<Vector>(*reinterpret_cast<const Words*>(from));
    }
  }
  PYDIST_HD void store(T* to) const {
    if constexpr (N == 1) {
      *to = element[0];
      return;
    }
    const Words words = this->words();
    Word<kWord>* const at = reinterpret_cast<Words*>(to)->word;
    PYDIST_UNROLLED
    for (int i = 0; i < kBytes / kWord; ++i) store_word(words.word[i], at + i);
  }

 private:
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kWord = kBytes < kVectorBytes ? kBytes : kVectorBytes;
  struct [[gnu::may_alias]] Words {
    Word<kWord> word[kBytes / kWord];
  };

  // nvcc may split an assignment into stores of 4 bytes, or of an element: it is written out here.
  static PYDIST_HD void store_word(const Word<kWord>& word, Word<kWord>* to) {
#if defined(__CUDA_ARCH__)
    if constexpr (kWord == 16) {
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.part[0]),
                   "r"(word.part[1]), "r"(word.part[2]), "r"(word.part[3])
                   : "memory");
      return;
    } else if constexpr (kWord == 8) {
      asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(word.part[0]),
                   "r"(word.part[1])
                   : "memory");
      return;
    }
#endif
    *to = word;
  }

  // Elements of 1 and 2 bytes are packed by arithmetic, into registers.
  PYDIST_HD Words words() const {
    if constexpr (sizeof(T) > 2 || kBytes < 4) {
      return bits_as<Words>(*this);
    } else {
      using Bits = std::conditional_t<sizeof(T) == 1, std::uint8_t, std::uint16_t>;
      constexpr int kPacked = 4 / static_cast<int>(sizeof(T));
      struct {
        std::uint32_t part[kBytes / 4];
      } packed{};
      PYDIST_UNROLLED
      for (int e = 0; e < N; ++e) {
        const std::uint32_t bits = bits_as<Bits>(element[e]);
        packed.part[e / kPacked] |= bits << (e % kPacked * 8 * static_cast<int>(sizeof(T)));
      }
      return bits_as<Words>(packed);
    }
  }
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
  // The first element of an array whose elements have `size` bytes; null is not an array.
  VectorFit& address(const void* data, index_t size) {
    const auto bytes =
        static_cast<std::uintptr_t>(std::min<index_t>(elements * size, kVectorBytes));
    fits = fits && reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
    return *this;
  }
};

}  // namespace pydist::ops
