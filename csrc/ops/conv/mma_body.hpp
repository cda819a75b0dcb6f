// Boundary convolution on tensor cores: an implicit matrix product of warps.
//
//   problem.hpp      the sums                       mma.hpp        one product of a warp
//   gather.hpp       addresses of operands          mma_load.hpp   loads into shared memory
//   mma_panel.hpp    operands in shared memory      mma_splits.hpp the blocks that share a sum
//   partial_body.hpp adds up split sums             mma_choice.hpp the instance for a problem
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "launch/decomposition.hpp"
#include "ops/common/half.hpp"
#include "ops/conv/gather.hpp"
#include "ops/conv/mma.hpp"
#include "ops/conv/mma_call.hpp"
#include "ops/conv/mma_load.hpp"
#include "ops/conv/mma_panel.hpp"
#include "ops/conv/mma_splits.hpp"

namespace pydist::ops {

// target[m, n] += sum_k left(m, k) * right(n, k) for each group of channels, in the layout of
// gather.hpp: m is gathered, n is a channel.
//
// Threads: a block of four warps makes a tile of 64 x kColumns; each warp has 16 rows of it. A step
//   is 16 words deep: 32 elements of 16 bits, or 16 floats.
//
//              k: 16 words a step              block (part, group, tile of m, tile of n, rank)
//            +----------------+
//   warp 0   | left: 16 rows  |                steps s + 1 ... s + 3         fragments of step s
//   warp 1   |       16 rows  |   times        ---------------------         -------------------
//   warp 2   |       16 rows  |   right        copies in flight              load, multiply, per
//   warp 3   |       16 rows  |   (columns)                                  slice of 8 words
//            +----------------+
//
// Latency: a slab is small, so the time of a block is its number of steps times the time of one.
//   Operands of the three next steps are in flight (mma_load.hpp), and no step waits for memory.
// Ragged sizes: elements outside count as 0. Products of 16 rows, 8 columns and 8 words that are
//   all outside are left out: 36 = 4 channels x 9 taps are 75 % of 3 products of 16.
// Few tiles (deep layers, and every wgrad): blocks share a tile's sum (mma_splits.hpp). Those of a
//   cluster add theirs up through shared memory, and if there are several clusters for a tile, each
//   writes its part to `partial` [part, group, m, n], and ConvPartialBody adds the parts up. Both
//   add in order, and the splits depend only on the problem: results are deterministic, also
//   between devices that have clusters.
// Traffic: (1/64 + 1/kColumns) elements read per multiply-add, one read and one written per
// output. Proof: tests/native/test_conv_mma.cpp by emulation, tests/gpu/test_conv_gpu.py on a
// device. CPU code: none of this; cpu_planes.cpp and cpu_wgrad.cpp.
template <ConvOp kOp, class Storage, ConvMath kMath, int kTileColumns>
struct ConvMmaBody {
  static constexpr int kThreads = kTileThreads;
  static constexpr int kRowBits = 6, kRows = 1 << kRowBits, kColumns = kTileColumns;
  static constexpr int kPack = 4 / sizeof(Storage);  // elements of a word
  static constexpr int kDepth = kTileWords * kPack;  // of a step
  static constexpr int kSlices = kTileWords / kMmaWords;
  static constexpr int kStages = 4;  // with the table, 44 KB of shared memory
  static constexpr int kTilesN = kColumns / kMmaColumns;
  static constexpr bool kIsSplit = std::is_same_v<Storage, float> && kMath == ConvMath::kTf32x3;
  static constexpr MmaFormat kFormat = std::is_same_v<Storage, float>     ? MmaFormat::kTf32
                                       : std::is_same_v<Storage, Float16> ? MmaFormat::kFloat16
                                                                          : MmaFormat::kBFloat16;
  static_assert(kRows == kThreads / launch::kWarp * kMmaRows &&
                std::has_single_bit(unsigned{kRows}));

  using Gather = ConvGather<kOp>;
  using Load = MmaLoad<kOp, Storage, kRows, kColumns>;
  struct Table {
    typename Gather::Tap taps[Gather::kMaxTaps];
  };
  struct Stage {
    typename Load::Left left;
    typename Load::Right right;
  };
  // The sums of a tile, and where its rows are in the target. Rows are 4 words from a multiple of
  // 32: eight rows of a column of 16-byte words are in different banks.
  struct alignas(16) Sums {
    float values[kRows][kColumns + 4];
    index_t offsets[kRows];
  };
  struct Thread {
    typename Load::Sources sources;
    std::int32_t first_step;
    LeftFragment left, left_low;
    RightFragment right[kTilesN], right_low[kIsSplit ? kTilesN : 1];
    ProductFragment sums[kTilesN];
  };

  struct alignas(4 * sizeof(Storage)) [[gnu::may_alias]] Quad {
    Storage values[4];
  };

  Gather gather;
  Load loads;
  std::int32_t m_extent, n_extent, k_extent;
  Divisor m_tiles, n_tiles, groups;
  MmaSplits splits;
  bool in_quads;  // four adjacent elements of the target are a word
  float* partial = nullptr;

  // The reason why a problem has no such kernel; empty if it has one.
  static std::string refusal(const ConvProblem& problem) { return Gather::refusal(problem); }

  // Sizes of the product and its splits. It needs `partial_elements` floats at `partial` to run.
  static ConvMmaBody make(const ConvProblem& problem, float* partial) {
    ConvMmaBody body{};
    body.gather = Gather::make(problem);
    body.loads = Load::make(body.gather);
    const std::int32_t pairs = body.gather.taps * body.gather.channels;
    constexpr bool kByPairs = kOp == ConvOp::kWgrad;
    body.m_extent = kByPairs ? pairs : body.gather.positions;
    body.k_extent = kByPairs ? body.gather.positions : pairs;
    body.n_extent = static_cast<std::int32_t>(kOp == ConvOp::kDgrad ? problem.in_channels
                                                                    : problem.out_channels);
    const auto divisor = [](index_t count) { return Divisor::by(std::max<index_t>(count, 1)); };
    body.m_tiles = divisor(ceil_div(body.m_extent, kRows));
    body.n_tiles = divisor(ceil_div(body.n_extent, kColumns));
    body.groups = divisor(problem.groups);
    body.splits = MmaSplits::of(body.tiles(), ceil_div(body.k_extent, kDepth));
    const SpatialArray& placed = body.gather.placed();
    body.in_quads = kOp != ConvOp::kWgrad &&
                    channel_alignment(placed, body.n_extent, sizeof(Storage), problem.batch) >=
                        static_cast<index_t>(sizeof(Quad));
    body.partial = partial;
    return body;
  }

  index_t tiles() const {
    return gather.problem.groups * ceil_div(m_extent, kRows) * ceil_div(n_extent, kColumns);
  }
  index_t partial_elements() const {
    return splits.parts < 2 ? 0 : splits.parts * gather.problem.groups * m_extent * n_extent;
  }

  // Instructions of the tensor cores in one launch.
  index_t products() const {
    return (kIsSplit ? 3 : 1) * gather.problem.groups * ceil_div(m_extent, kMmaRows) *
           ceil_div(n_extent, kMmaColumns) * ceil_div(k_extent, kMmaWords * kPack);
  }
  // The fraction of their multiply-adds that the result needs: ragged sizes waste the rest.
  double useful() const {
    const double wanted =
        static_cast<double>(gather.problem.groups) * m_extent * n_extent * k_extent;
    return wanted / (static_cast<double>(products()) * kMmaRows * kMmaColumns * kMmaWords * kPack);
  }

  // Without splits there is nothing to add.
  PYDIST_HD index_t blocks() const {
    const index_t each = gather.problem.groups * splits.parts * splits.cluster;
    return m_extent == 0 || n_extent == 0 ? 0 : each * m_tiles.divisor * n_tiles.divisor;
  }
  PYDIST_HD int cluster() const { return splits.cluster; }
  ConvMmaBody alone() const {
    ConvMmaBody body = *this;
    body.splits = splits.alone();
    return body;
  }
  PYDIST_HD index_t steps(index_t block) const {
    const std::int32_t rest = (k_extent + kDepth - 1) / kDepth - where(block).first_step;
    return rest < 0 ? 0 : rest < splits.steps ? rest : splits.steps;
  }

  // Fills the block's table of taps, finds what this thread reads, and zeros its sums.
  PYDIST_HD void begin(index_t block, int thread, Thread& state, Table& table) const {
    for (int i = thread; i < gather.taps; i += kThreads) table.taps[i] = gather.tap(i);
    const Where at = where(block);
    const auto anchor = [&](int row) {
      const std::int32_t m = at.row + row;
      return gather.anchor(gather.position(m < m_extent ? m : 0));
    };
    loads.begin(gather, at.group, {at.row, m_extent - at.row}, {at.column, n_extent - at.column},
                thread, anchor, state.sources);
    state.first_step = at.first_step;
    launch::keep(state.first_step);
    PYDIST_UNROLLED
    for (int j = 0; j < kTilesN; ++j) state.sums[j] = {};
  }

  // This thread's share of bringing step `step` of both sides into a stage.
  template <class Copies>
  PYDIST_HD void fetch(index_t step, int thread, const Thread& state, const Table& table,
                       Stage& stage, Copies&& copies) const {
    const std::int32_t first = depth(state, step);
    const MmaRange k{first, k_extent - first};
    const auto& sources = state.sources;
    if constexpr (kOp == ConvOp::kWgrad) {
      if constexpr (Load::kSameRows) {
        if (loads.finds_once()) {
          return loads.pairs_and_gradient(gather, table.taps, sources, k, thread, stage.left,
                                          stage.right, copies);
        }
      }
      loads.pairs(gather, table.taps, sources, k, thread, stage.left, copies);
      loads.gradient(gather, sources, k, thread, stage.right, copies);
    } else {
      loads.anchors(gather, table.taps, sources, k, thread, stage.left, copies);
      if constexpr (kOp == ConvOp::kForward) {
        loads.weights_along(gather, table.taps, sources, k, thread, stage.right, copies);
      } else {
        loads.weights_across(gather, table.taps, sources, k, thread, stage.right, copies);
      }
    }
  }

  // Reads this lane's words of a slice into fragments (mma.hpp). With three products a word is
  // also split into high and low part.
  PYDIST_HD void load(int slice, int thread, const Stage& stage, Thread& state) const {
    const int lane = thread % launch::kWarp;
    std::uint32_t words[4];
    load_fragment<true>(stage.left, lane, thread / launch::kWarp * kMmaRows, slice, words);
    PYDIST_UNROLLED
    for (int part = 0; part < 4; ++part) {
      set(words[part], state.left.words[part], state.left_low.words[part]);
    }
    PYDIST_UNROLLED
    for (int j = 0; j < kTilesN; j += 2) {
      load_fragment<false>(stage.right, lane, j * kMmaColumns, slice, words);
      PYDIST_UNROLLED
      for (int part = 0; part < 4; ++part) {
        const int column = j + part / 2;
        set(words[part], state.right[column].words[part % 2],
            state.right_low[kIsSplit ? column : 0].words[part % 2]);
      }
    }
  }

  // The products of one warp and slice, without those whose result or operands are outside.
  template <class Warp>
  PYDIST_HD void multiply(index_t step, int slice, int warp_index, const Warp& warp) const {
    const Thread& any = *warp.lanes;  // what it asks is the same in all lanes
    if (depth(any, step) + slice * kMmaWords * kPack >= k_extent) return;
    if (warp_index * kMmaRows >= any.sources.rows) return;
    const std::int32_t columns = any.sources.columns;
    if (columns >= kColumns) return multiply_columns<true>(columns, warp);
    multiply_columns<false>(columns, warp);
  }

  // Stores this lane's sums where all blocks of the cluster can read them.
  PYDIST_HD void share(index_t block, int thread, const Thread& state, Sums& sums) const {
    const int lane = thread % launch::kWarp;
    const int row = thread / launch::kWarp * kMmaRows + lane / 4;
    PYDIST_UNROLLED
    for (int j = 0; j < kTilesN; ++j) {
      PYDIST_UNROLLED
      for (int i = 0; i < 4; ++i) {
        sums.values[row + i / 2 * 8][j * kMmaColumns + lane % 4 * 2 + i % 2] =
            state.sums[j].values[i];
      }
    }
    if (thread >= kRows) return;
    const Where at = where(block);
    const std::int32_t m = at.row + thread;
    const bool is_part = splits.parts > 1;
    sums.offsets[thread] = m >= m_extent ? 0
                           : is_part     ? partial_row(at.part, at.group, m)
                                         : target_offset(at.group, m);
  }

  // Adds up the sums of the cluster's blocks, in order, in this block's share of the rows, and adds
  // them to the target or stores them as a part. A thread has four columns of a row at a time, and
  // reads the target for several of them before it writes the first: one way to memory. Neighboring
  // threads go along the dim in which the target is adjacent.
  template <class Peers>
  PYDIST_HD void end(index_t block, int thread, const Peers& peers) const {
    constexpr int kQuads = kColumns / 4, kAhead = 4;
    const Where at = where(block);
    const int row_bits = kRowBits - splits.cluster_bits;
    const int rows = 1 << row_bits, first_row = at.rank * rows;
    const bool is_part = splits.parts > 1, by_rows = !is_part && target_stride() != 1;
    const index_t stride = is_part ? 1 : target_stride();
    const Sums& own = peers(at.rank);
    PYDIST_ROLLED
    for (int first = thread; first < rows * kQuads; first += kAhead * kThreads) {
      Quad before[kAhead]{};
      // Of quad i of this thread: f(row and column of the tile, how many of it are inside, offset).
      const auto quad = [&](int i, const auto& f) {
        const int index = first + i * kThreads;
        const int row = first_row + (by_rows ? index & (rows - 1) : index / kQuads);
        const int column = (by_rows ? index >> row_bits : index % kQuads) * 4;
        const std::int32_t rest = n_extent - at.column - column;
        if (index >= rows * kQuads || at.row + row >= m_extent || rest <= 0) return;
        f(row, column, rest < 4 ? static_cast<int>(rest) : 4,
          own.offsets[row] + (at.column + column) * stride);
      };
      PYDIST_UNROLLED
      for (int i = 0; i < kAhead && !is_part; ++i) {
        quad(i, [&](int, int, int count, index_t offset) {
          const Storage* const from = target() + offset;
          if (in_quads) {
            before[i] = *reinterpret_cast<const Quad*>(from);
          } else {
            PYDIST_UNROLLED
            for (int j = 0; j < 4; ++j) {
              if (j < count) before[i].values[j] = from[j * stride];
            }
          }
        });
      }
      PYDIST_UNROLLED
      for (int i = 0; i < kAhead; ++i) {
        quad(i, [&](int row, int column, int count, index_t offset) {
          const Word<16> sums = sum_of(peers, row, column);
          Quad after;
          PYDIST_UNROLLED
          for (int j = 0; j < 4; ++j) {
            const auto sum = bits_as<float>(sums.part[j]);
            if (is_part) {
              if (j < count) partial[offset + j] = sum;
            } else {
              after.values[j] = finished(before[i].values[j], sum);
              if (!in_quads && j < count) target()[offset + j * stride] = after.values[j];
            }
          }
          if (in_quads && !is_part) *reinterpret_cast<Quad*>(target() + offset) = after;
        });
      }
    }
  }

  // The target, element 0 of its row m, the stride of its elements, and the new value of one.
  PYDIST_HD Storage* target() const {
    return static_cast<Storage*>(kOp == ConvOp::kWgrad ? gather.problem.weight.data
                                                       : gather.placed().data);
  }
  PYDIST_HD index_t target_offset(std::int32_t g, std::int32_t m) const {
    const ConvProblem& p = gather.problem;
    if constexpr (kOp == ConvOp::kWgrad) {
      const auto pair = gather.pair(m);
      return gather.tap(pair.tap).weight + g * p.out_channels * p.weight.strides[0] +
             pair.channel * p.weight.strides[1];
    } else {
      return gather.offset_of(gather.position(m)) + g * n_extent * gather.placed().strides[1];
    }
  }
  PYDIST_HD index_t target_stride() const {
    return kOp == ConvOp::kWgrad ? gather.problem.weight.strides[0] : gather.placed().strides[1];
  }
  PYDIST_HD Storage finished(const Storage& before, float sum) const {
    return store_as<Storage>(load_as(before) + sum);
  }
  PYDIST_HD index_t partial_row(index_t part, index_t g, index_t m) const {
    return ((part * gather.problem.groups + g) * m_extent + m) * n_extent;
  }

 private:
  static PYDIST_HD void set(std::uint32_t word, std::uint32_t& high, std::uint32_t& low) {
    if constexpr (!std::is_same_v<Storage, float>) {
      high = word;
    } else if constexpr (kIsSplit) {
      const SplitFloat parts = split_float(word);
      high = parts.high;
      low = parts.low;
    } else {
      high = to_tf32(word);
    }
  }

  template <bool kWhole, class Warp>
  PYDIST_HD void multiply_columns(std::int32_t columns, const Warp& warp) const {
    PYDIST_UNROLLED
    for (int j = 0; j < kTilesN; ++j) {
      if (!kWhole && j * kMmaColumns >= columns) continue;
      const auto left = [](const Thread& t) -> const auto& { return t.left; };
      const auto right = [j](const Thread& t) -> const auto& { return t.right[j]; };
      const auto sum = [j](Thread& t) -> auto& { return t.sums[j]; };
      if constexpr (kIsSplit) {  // the small products first
        const auto left_low = [](const Thread& t) -> const auto& { return t.left_low; };
        const auto right_low = [j](const Thread& t) -> const auto& { return t.right_low[j]; };
        multiply_warp<kFormat>(warp, left_low, right, sum);
        multiply_warp<kFormat>(warp, left, right_low, sum);
      }
      multiply_warp<kFormat>(warp, left, right, sum);
    }
  }

  // The sum of the cluster's blocks of four columns of a row. All are read before the first is
  // added.
  template <class Peers>
  PYDIST_HD Word<16> sum_of(const Peers& peers, int row, int column) const {
    Word<16> terms[launch::kMaxCluster]{};
    PYDIST_UNROLLED
    for (int rank = 0; rank < launch::kMaxCluster; ++rank) {
      if (rank >= splits.cluster) continue;
      terms[rank] = *reinterpret_cast<const Word<16>*>(&peers(rank).values[row][column]);
    }
    Word<16> sum = terms[0];
    PYDIST_UNROLLED
    for (int rank = 1; rank < launch::kMaxCluster; ++rank) {
      if (rank >= splits.cluster) continue;
      PYDIST_UNROLLED
      for (int j = 0; j < 4; ++j) {
        const float more = bits_as<float>(sum.part[j]) + bits_as<float>(terms[rank].part[j]);
        sum.part[j] = bits_as<std::uint32_t>(more);
      }
    }
    return sum;
  }

  // What a block computes, and the first step that it does.
  struct Where {
    std::int32_t rank, part, group, row, column, first_step;
  };
  // Blocks are counted over (part, group, tile of rows, tile of columns, rank in the cluster).
  PYDIST_HD Where where(index_t block) const {
    Where at{};
    auto rest = static_cast<std::int32_t>(block);
    const auto next = [&rest](const Divisor& count) {
      const std::int32_t quotient = count.quotient(rest), index = rest - quotient * count.divisor;
      rest = quotient;
      return index;
    };
    at.rank = next(splits.ranks);
    at.column = next(n_tiles) * kColumns;
    at.row = next(m_tiles) * kRows;
    at.group = next(groups);
    at.part = next(splits.part_count);
    at.first_step = (at.part * splits.cluster + at.rank) * splits.steps;
    return at;
  }
  PYDIST_HD std::int32_t depth(const Thread& state, index_t step) const {
    return (state.first_step + static_cast<std::int32_t>(step)) * kDepth;
  }
};

}  // namespace pydist::ops
