// Loads the operands of a boundary convolution on tensor cores into shared memory.
//
//            left panel                      right panel
//   forward  anchors (along: gathered)       weights_along
//   dgrad    anchors (along: gathered)       weights_across
//   wgrad    pairs (across: gathered)        gradient (across)
//
// Elements outside of an array, or beyond the extents, become 0, so that products need no checks.
// In channels-last arrays reads are 16 bytes wide. All reads of a thread are in flight together:
// they are asynchronous copies, except for single elements of 16 bits.
#pragma once

#include <cstdint>

#include "ops/conv/gather.hpp"
#include "ops/conv/mma_panel.hpp"

namespace pydist::ops {

// How the channels of an array are read, 16 bytes of a panel at a time.
enum class MmaRead : std::int32_t {
  kVectors,   // in 16 bytes
  kHalves,    // in 8 bytes, of four channels of 16 bits; each half may have another kernel index
  kRuns,      // one by one, all with the same kernel index
  kElements,  // one by one
};

// `first`, and the number of rows, columns or elements of k from it to the end of the extent.
struct MmaRange {
  std::int32_t first, count;
};

// The largest power of two up to 16 to which each channel 0 of an array is aligned, in bytes; 0 if
// its channels are not adjacent. `channels` of a group.
inline index_t channel_alignment(const SpatialArray& array, index_t channels, index_t bytes,
                                 index_t batch) {
  if (array.strides[1] != 1) return 0;
  index_t alignment =
      static_cast<index_t>(reinterpret_cast<std::uintptr_t>(array.data)) | channels * bytes | 16;
  for (int dim = 0; dim < 2 + kSpatialDims; ++dim) {
    const bool is_one = dim == 0 && batch == 1;
    if (dim != 1 && !is_one) alignment |= array.strides[dim] * bytes;
  }
  return alignment & -alignment;
}

template <ConvOp kOp, class Storage, int kTileRows, int kTileColumns>
struct MmaLoad {
  using Gather = ConvGather<kOp>;
  using Anchor = typename Gather::Anchor;
  using Tap = typename Gather::Tap;
  using Left = MmaPanel<Storage, kTileRows, kOp == ConvOp::kWgrad>;
  using Right = MmaPanel<Storage, kTileColumns, kOp != ConvOp::kForward>;
  static constexpr int kVector = Left::kVector;
  static constexpr int kSize = sizeof(Storage);

  // What a thread keeps in registers through all steps: where both sides of its tile begin, and the
  // anchors (forward and dgrad, left) and weights (forward, right) of the rows of its pieces.
  struct Sources {
    const Storage *left, *right;
    Anchor anchors[Left::kPieces];
    const Storage* weights[Right::kPieces];
    std::int32_t first_row, rows, columns;  // of the tile; rows and columns to the end of all
  };

  MmaRead left, right;

  static MmaLoad make(const Gather& gather) {
    const ConvProblem& p = gather.problem;
    MmaLoad loads{};
    loads.left = read_of(gather.source(), gather.channels, p.batch);
    if (gather.taps_inside) loads.left = MmaRead::kElements;
    if (kOp == ConvOp::kWgrad) {
      loads.right = read_of(p.out, p.out_channels, p.batch);
    } else {
      loads.right = read_of(p.weight, p.in_channels, 2);
      if (kOp == ConvOp::kForward && gather.taps_inside) loads.right = MmaRead::kElements;
    }
    return loads;
  }

  // Of the tile of group g whose first row and column are given; `anchor(row)`: of a row.
  template <class AnchorOf>
  PYDIST_HD void begin(const Gather& gather, std::int32_t g, MmaRange rows, MmaRange columns,
                       int thread, const AnchorOf& anchor, Sources& of) const {
    const ConvProblem& p = gather.problem;
    const SpatialArray& source = gather.source();
    of.first_row = rows.first;
    of.rows = rows.count;
    of.columns = columns.count;
    of.left = static_cast<const Storage*>(source.data) + g * gather.channels * source.strides[1];
    if constexpr (kOp == ConvOp::kWgrad) {
      of.right = static_cast<const Storage*>(p.out.data) +
                 (g * p.out_channels + columns.first) * p.out.strides[1];
    } else {
      of.right = static_cast<const Storage*>(p.weight.data) +
                 g * p.out_channels * p.weight.strides[0] +
                 columns.first * p.weight.strides[kOp == ConvOp::kForward ? 0 : 1];
      PYDIST_UNROLLED
      for (int i = 0; i < Left::kPieces; ++i) of.anchors[i] = anchor(row_along(thread, i));
    }
    if constexpr (kOp == ConvOp::kForward) {
      PYDIST_UNROLLED
      for (int i = 0; i < Right::kPieces; ++i) {
        const int row = row_along(thread, i);
        of.weights[i] = of.right + (row < columns.count ? row * p.weight.strides[0] : 0);
        launch::keep(of.weights[i]);
      }
    }
    launch::keep(of.left);
    launch::keep(of.right);
    launch::keep(of.first_row);
    launch::keep(of.rows);
    launch::keep(of.columns);
  }

  // The row of an along panel that piece i of a thread belongs to.
  static PYDIST_HD int row_along(int thread, int i) {
    return thread / Left::kChunks + i * (kTileThreads / Left::kChunks);
  }

  // Forward and dgrad, left: rows are anchors; k is a pair of a kernel index and a channel.
  template <class Copies>
  PYDIST_HD void anchors(const Gather& gather, const Tap* taps, const Sources& of, MmaRange k,
                         int thread, Left& panel, Copies&& copies) const {
    with_read(left, [&]<int kRun, int kBytes>() {
      const index_t stride = stride_of<kBytes>(gather.source().strides[1]);
      along<kRun>(gather, taps, k, thread,
                  [&](int chunk, int e, bool wanted, const Tap& tap, std::int32_t channel) {
                    PYDIST_UNROLLED
                    for (int i = 0; i < Left::kPieces; ++i) {
                      const int row = row_along(thread, i);
                      index_t offset;
                      const bool inside =
                          gather.find(of.anchors[i], tap, offset) && wanted && row < of.rows;
                      copy_run<kRun, kBytes>(
                          panel.at(row, chunk), e,
                          inside ? of.left + (offset + channel * stride) : of.left, stride, inside,
                          copies);
                    }
                  });
    });
  }

  // Forward, right: rows are the channels of the target, k is as on the left.
  template <class Copies>
  PYDIST_HD void weights_along(const Gather& gather, const Tap* taps, const Sources& of, MmaRange k,
                               int thread, Right& panel, Copies&& copies) const {
    with_read(right, [&]<int kRun, int kBytes>() {
      const index_t stride = stride_of<kBytes>(gather.problem.weight.strides[1]);
      along<kRun>(gather, taps, k, thread,
                  [&](int chunk, int e, bool wanted, const Tap& tap, std::int32_t channel) {
                    const index_t pair = wanted ? tap.weight + channel * stride : 0;
                    PYDIST_UNROLLED
                    for (int i = 0; i < Right::kPieces; ++i) {
                      const int row = row_along(thread, i);
                      copy_run<kRun, kBytes>(panel.at(row, chunk), e, of.weights[i] + pair, stride,
                                             wanted && row < of.columns, copies);
                    }
                  });
    });
  }

  // Dgrad, right: rows are k, as on the left; lines are the channels of the target.
  template <class Copies>
  PYDIST_HD void weights_across(const Gather& gather, const Tap* taps, const Sources& of,
                                MmaRange k, int thread, Right& panel, Copies&& copies) const {
    const index_t* const strides = gather.problem.weight.strides;
    with_read(right, [&]<int kRun, int kBytes>() {
      const index_t stride = stride_of<kBytes>(strides[1]);
      across<kRun, kBytes>(
          panel, thread, stride, of.right, copies,
          [&](int row) {
            const auto pair = gather.pair(row < k.count ? k.first + row : 0);
            return taps[pair.tap].weight + pair.channel * strides[0];
          },
          [&](index_t pair, int row, int line, index_t& offset) {
            offset = pair + line * stride;
            return row < k.count && line < of.columns;
          });
    });
  }

  // Wgrad, left: rows are k, positions; lines are pairs of a kernel index and a channel.
  template <class Copies>
  PYDIST_HD void pairs(const Gather& gather, const Tap* taps, const Sources& of, MmaRange k,
                       int thread, Left& panel, Copies&& copies) const {
    with_read(left, [&]<int kRun, int kBytes>() {
      const index_t stride = stride_of<kBytes>(gather.source().strides[1]);
      across<kRun, kBytes>(
          panel, thread, stride, of.left, copies,
          [&](int row) {
            return gather.anchor(gather.position(row < k.count ? k.first + row : 0));
          },
          [&](const Anchor& anchor, int row, int line, index_t& offset) {
            const bool wanted = row < k.count && line < of.rows;
            const auto pair = gather.pair(line < of.rows ? of.first_row + line : 0);
            const Tap tap = taps[pair.tap];
            const bool inside = gather.find(anchor, tap, offset);
            offset += pair.channel * stride;
            return inside && wanted;
          });
    });
  }

  // Wgrad, both sides, where both are read in vectors and a thread has the same rows of both: it
  // finds a position, which takes half of the instructions, once.
  static constexpr bool kSameRows = static_cast<int>(Left::kChunks) == Right::kChunks;
  PYDIST_HD bool finds_once() const {
    return kSameRows && left == MmaRead::kVectors && right == MmaRead::kVectors;
  }
  template <class Copies>
  PYDIST_HD void pairs_and_gradient(const Gather& gather, const Tap* taps, const Sources& of,
                                    MmaRange k, int thread, Left& to_left, Right& to_right,
                                    Copies&& copies) const {
    const int chunk = thread % Left::kChunks, line = chunk * kVector;
    const bool has_pair = line < of.rows, has_column = line < of.columns;
    const auto pair = gather.pair(has_pair ? of.first_row + line : 0);
    const Tap tap = taps[pair.tap];
    PYDIST_UNROLLED
    for (int i = 0; i < Left::kPieces; ++i) {
      const int row = row_along_k(thread, i);
      const bool wanted = row < k.count;
      const auto position = gather.position(wanted ? k.first + row : 0);
      index_t offset;
      const bool inside = gather.find(gather.anchor(position), tap, offset) && wanted && has_pair;
      copies.template copy<16>(to_left.at(row, chunk),
                               inside ? of.left + (offset + pair.channel) : of.left, inside);
      const bool has_both = wanted && has_column;
      const index_t out = has_both ? gather.offset_of(position) + line : 0;
      copies.template copy<16>(to_right.at(row, chunk), of.right + out, has_both);
    }
  }

  // Wgrad, right: rows are k, positions; lines are channels of the output's gradient.
  template <class Copies>
  PYDIST_HD void gradient(const Gather& gather, const Sources& of, MmaRange k, int thread,
                          Right& panel, Copies&& copies) const {
    with_read(right, [&]<int kRun, int kBytes>() {
      const index_t stride = stride_of<kBytes>(gather.problem.out.strides[1]);
      across<kRun, kBytes>(
          panel, thread, stride, of.right, copies,
          [&](int row) {
            return gather.offset_of(gather.position(row < k.count ? k.first + row : 0));
          },
          [&](index_t position, int row, int line, index_t& offset) {
            offset = position + line * stride;
            return row < k.count && line < of.columns;
          });
    });
  }

 private:
  // The row of an across panel that piece i of a thread belongs to, where chunks are adjacent.
  static PYDIST_HD int row_along_k(int thread, int i) {
    return thread / Left::kChunks + i * (kTileThreads / Left::kChunks);
  }

  static MmaRead read_of(const SpatialArray& array, index_t channels, index_t batch) {
    const index_t alignment = channel_alignment(array, channels, kSize, batch);
    if (alignment == 16) return MmaRead::kVectors;
    if (alignment == 8 && kSize == 2) return MmaRead::kHalves;
    return channels % kVector == 0 ? MmaRead::kRuns : MmaRead::kElements;
  }

  // Of channels; those that are copied together are adjacent.
  template <int kBytes>
  static PYDIST_HD index_t stride_of(index_t stride) {
    return kBytes > kSize ? 1 : stride;
  }

  // Calls f<elements that have one kernel index, bytes of a copy>.
  template <class F>
  static PYDIST_HD void with_read(MmaRead read, const F& f) {
    if (read == MmaRead::kVectors) {
      f.template operator()<kVector, 16>();
    } else if (kSize == 2 && read == MmaRead::kHalves) {
      f.template operator()<(kSize == 2 ? 4 : kVector), 8>();
    } else if (read == MmaRead::kRuns) {
      f.template operator()<kVector, kSize>();
    } else {
      f.template operator()<1, kSize>();
    }
  }

  // The runs of a thread's chunk of an along panel, which is the same in all its rows:
  // f(chunk, element of the chunk, whether it is inside k, kernel index, channel).
  template <int kRun, class F>
  static PYDIST_HD void along(const Gather& gather, const Tap* taps, MmaRange k, int thread,
                              const F& f) {
    const int chunk = thread % Left::kChunks;
    PYDIST_UNROLLED
    for (int e = 0; e < kVector; e += kRun) {
      const int i = chunk * kVector + e;
      const bool wanted = i < k.count;
      const auto pair = gather.pair(wanted ? k.first + i : 0);
      const Tap tap = taps[pair.tap];  // all of it: one latency of shared memory
      f(chunk, e, wanted, tap, pair.channel);
    }
  }

  // The runs of a thread in an across panel. `row_of(row)`: what the elements of a row share;
  // `find(that, row, line, offset)`: whether an element is inside, and where. Neighboring threads
  // take chunks of a row if its lines are adjacent in memory; else neighboring rows, as positions
  // may be adjacent.
  template <int kRun, int kBytes, class Panel, class Copies, class RowOf, class Find>
  static PYDIST_HD void across(Panel& panel, int thread, index_t stride, const Storage* source,
                               Copies&& copies, const RowOf& row_of, const Find& find) {
    constexpr bool kWide = kBytes > kSize;
    PYDIST_UNROLLED
    for (int i = 0; i < Panel::kPieces; ++i) {
      const int index = thread + i * kTileThreads;
      const int row = kWide ? index / Panel::kChunks : index % Panel::kRows;
      const int chunk = kWide ? index % Panel::kChunks : index / Panel::kRows;
      const auto shared = row_of(row);
      PYDIST_UNROLLED
      for (int e = 0; e < kVector; e += kRun) {
        index_t offset;
        const bool inside = find(shared, row, chunk * kVector + e, offset);
        copy_run<kRun, kBytes>(panel.at(row, chunk), e, inside ? source + offset : source, stride,
                               inside, copies);
      }
    }
  }

  // Copies kRun elements to element `e` of a chunk. Single elements of 16 bits go through
  // registers: all are read before the first is written.
  template <int kRun, int kBytes, class Copies>
  static PYDIST_HD void copy_run(std::uint32_t* chunk, int e, const Storage* from, index_t stride,
                                 bool inside, Copies&& copies) {
    auto* const to = reinterpret_cast<Word<kSize>*>(chunk) + e;
    if constexpr (kBytes == 2) {
      Word<2> read[kRun] = {};
      PYDIST_UNROLLED
      for (int i = 0; i < kRun; ++i) {
        if (inside) read[i] = *reinterpret_cast<const Word<2>*>(from + i * stride);
      }
      PYDIST_UNROLLED
      for (int i = 0; i < kRun; ++i) to[i] = read[i];
    } else {
      constexpr int kElements = kBytes / kSize;
      PYDIST_UNROLLED
      for (int i = 0; i < kRun; i += kElements) {
        copies.template copy<kBytes>(to + i, inside ? from + i * stride : from, inside);
      }
    }
  }
};

}  // namespace pydist::ops
