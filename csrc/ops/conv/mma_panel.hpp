// Panels: the operands of a step in shared memory, and the fragments that warps read from them.
//
//   along                                   across
//   a row per line of the tile (a row of    a row per index of k; it holds the lines
//   the left side, a column of the right);  of the tile
//   it holds the words of k
//
//            k ->                                    lines ->
//   line 0   w0 w1 ... w15 (padding)         k = 0   l0 l1 l2 ...      (padding)
//   line 1   w0 w1 ... w15                   k = 1   l0 l1 l2 ...
//
// A panel is stored the way in which the operand is adjacent in memory, so that it arrives in
// copies of 16 bytes; the transposition of across panels happens when fragments are read.
#pragma once

#include <cstdint>

#include "launch/decomposition.hpp"
#include "ops/common/half.hpp"
#include "ops/common/word.hpp"

namespace pydist::ops {

inline constexpr int kTileWords = 16;  // of k, in one step
inline constexpr int kTileThreads = 128;

// The padding keeps accesses to one bank apart: rows along k are 20 words apart, so that the 16
// bytes of eight rows (ldmatrix) are in 32 banks; so are rows across of 16-bit elements. Of floats
// across, a fragment reads eight lines in each of four rows, which are 8 words apart.
template <class Storage, int kLines, bool kIsAcross>
struct alignas(16) MmaPanel {
  static constexpr bool kAcross = kIsAcross;
  static constexpr int kPack = 4 / sizeof(Storage);     // elements of a word
  static constexpr int kVector = 16 / sizeof(Storage);  // of a chunk of 16 bytes
  static constexpr int kRows = kAcross ? kTileWords * kPack : kLines;
  static constexpr int kRowWords = kAcross ? kLines / kPack : kTileWords;
  static constexpr int kPitch = kRowWords + (kAcross && kPack == 1 ? 8 : 4);
  static constexpr int kChunks = kRowWords / 4;                   // of a row
  static constexpr int kPieces = kRows * kChunks / kTileThreads;  // chunks of a thread
  static_assert(kPieces * kTileThreads == kRows * kChunks && kTileThreads % kChunks == 0 &&
                kTileThreads % kRows == 0);

  std::uint32_t words[kRows * kPitch];

  PYDIST_HD std::uint32_t* at(int row, int chunk) { return words + row * kPitch + chunk * 4; }
  PYDIST_HD const std::uint32_t* row(int row) const { return words + row * kPitch; }
};

// Four matrices of 8 rows of 16 bytes, read by a warp (ldmatrix of PTX): lane 8 i + r names row r
// of matrix i, and gets word lane % 4 of row lane / 4 of each matrix. Transposed, the elements have
// 16 bits: it gets those of column lane / 4 in rows 2 (lane % 4) and 2 (lane % 4) + 1.
//
// `row_of(lane)`: the row that a lane names; in emulation every lane looks up the rows of others.
template <bool kTransposed, class RowOf>
PYDIST_HD void load_matrices(int lane, const RowOf& row_of, std::uint32_t (&words)[4]) {
#if defined(__CUDA_ARCH__)
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row_of(lane)));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
  }
#else
  const int row = lane / 4, word = lane % 4;
  for (int i = 0; i < 4; ++i) {
    if constexpr (kTransposed) {
      const auto half = [&](int k) {
        return row_of(8 * i + k)[row / 2] >> (16 * (row % 2)) & 0xffffu;
      };
      words[i] = half(2 * word) | half(2 * word + 1) << 16;
    } else {
      words[i] = row_of(8 * i + row)[word];
    }
  }
#endif
}

// The words of this lane in 16 lines, from `line` on, and the 8 words of k of a slice, as four
// matrices. kLinesFirst: in the order of a left fragment, (lines 0-7, words 0-3), (lines 8-15,
// words 0-3), (lines 0-7, words 4-7), (lines 8-15, words 4-7); else with the middle two exchanged,
// which are the fragments of two columns of products.
template <bool kLinesFirst, class Storage, int kLines, bool kAcross>
PYDIST_HD void load_fragment(const MmaPanel<Storage, kLines, kAcross>& panel, int lane, int line,
                             int slice, std::uint32_t (&words)[4]) {
  using Panel = MmaPanel<Storage, kLines, kAcross>;
  constexpr int kWords = 8;  // of k, in a slice
  const auto upper_lines = [](int matrix) { return (kLinesFirst ? matrix : matrix / 2) % 2 * 8; };
  const auto upper_words = [](int matrix) { return (kLinesFirst ? matrix / 2 : matrix) % 2 * 4; };
  if constexpr (!kAcross) {
    load_matrices<false>(
        lane,
        [&](int l) {
          return panel.row(line + upper_lines(l / 8) + l % 8) + slice * kWords + upper_words(l / 8);
        },
        words);
  } else if constexpr (Panel::kPack == 2) {
    load_matrices<true>(
        lane,
        [&](int l) {
          return panel.row((slice * kWords + upper_words(l / 8)) * 2 + l % 8) +
                 (line + upper_lines(l / 8)) / 2;
        },
        words);
  } else {
    PYDIST_UNROLLED
    for (int i = 0; i < 4; ++i) {
      words[i] =
          panel.row(slice * kWords + upper_words(i) + lane % 4)[line + upper_lines(i) + lane / 4];
    }
  }
}

}  // namespace pydist::ops
