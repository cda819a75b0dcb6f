// Boundary convolution on tensor cores: an implicit matrix product of warps.
//
//   problem.hpp      the sums                       mma.hpp        one product of a warp
//   gather.hpp       addresses of operands          mma_load.hpp   loads into shared memory
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

namespace pydist::ops {

// target[m, n] += sum_k left(m, k) * right(n, k) for each group of channels, in the layout of
// gather.hpp: m is gathered, n is a channel.
//
// Threads: a block of four warps makes a tile of 128 x kColumns; each warp has 32 rows of it. A
//   step is 16 words deep: 32 elements of 16 bits, or 16 floats. Both sides are stored in shared
//   memory in rows along k, 20 words apart, so that the lanes of a fragment hit 32 different banks.
//
//              k: 16 words a step              block (split, group, tile of m, tile of n)
//            +----------------+
//   warp 0   | left: 32 rows  |                stage s + 1 is fetched     fragments of stage s
//   warp 1   |       32 rows  |   times        ----------------------     --------------------
//   warp 2   |       32 rows  |   right        copies in flight           load, multiply, per slice
//   warp 3   |       32 rows  |   (columns)                               of 8 words
//            +----------------+
//
// Double-buffered: the next step is fetched while this one is multiplied; where channels are
//   adjacent, by copies that do not go through registers (mma_load.hpp).
// Ragged sizes: elements outside count as 0. Products of 16 rows, 8 columns and 8 words that are
//   all outside are left out: 36 = 4 channels x 9 taps are 75 % of 3 products of 16.
// Few tiles (deep layers, and every wgrad): `splits` blocks share a tile's sum; each writes its
//   part to `partial` [split, group, m, n], and ConvPartialBody adds the parts up in order. The
//   number of splits depends only on the problem, so results are deterministic, also between
//   devices.
// Traffic: (1/128 + 1/kColumns) elements read per multiply-add, one read and one written per
// output. Proof: tests/native/test_conv_mma.cpp by emulation, tests/gpu/test_conv_gpu.py on a
// device. CPU code: none of this; cpu_planes.cpp and cpu_wgrad.cpp.
template <ConvOp kOp, class Storage, ConvMath kMath, int kTileColumns>
struct ConvMmaBody {
  static constexpr int kThreads = 128;
  static constexpr int kRows = 128, kColumns = kTileColumns;
  static constexpr int kPack = MmaTile<Storage>::kPack;  // elements of a word
  static constexpr int kDepth = kTileWords * kPack;      // of a step
  static constexpr int kSlices = kTileWords / kMmaWords;
  static constexpr int kWarpRows = kRows / (kThreads / launch::kWarp);
  static constexpr int kTilesM = kWarpRows / kMmaRows, kTilesN = kColumns / kMmaColumns;
  static constexpr index_t kWantedBlocks = 264;  // two for each multiprocessor of an H100
  static constexpr index_t kStepsASplit = 8;     // at least: a partial sum costs a write and a read
  static constexpr bool kIsSplit = std::is_same_v<Storage, float> && kMath == ConvMath::kTf32x3;
  static constexpr MmaFormat kFormat = std::is_same_v<Storage, float>     ? MmaFormat::kTf32
                                       : std::is_same_v<Storage, Float16> ? MmaFormat::kFloat16
                                                                          : MmaFormat::kBFloat16;

  using Gather = ConvGather<kOp>;
  struct Table {
    typename Gather::Tap taps[Gather::kMaxTaps];
  };
  struct Stage {
    MmaRow left[kRows], right[kColumns];
  };
  struct Thread {
    typename Gather::Place row;  // that this thread gathers for; wgrad: unused
    LeftFragment left[kTilesM], left_low[kIsSplit ? kTilesM : 1];
    RightFragment right[kTilesN], right_low[kIsSplit ? kTilesN : 1];
    ProductFragment sums[kTilesM][kTilesN];
  };

  Gather gather;
  MmaLoad<kOp, Storage> loads;
  std::int32_t m_extent, n_extent, k_extent;
  std::int32_t splits, split_steps;
  float* partial = nullptr;

  // The reason why a problem has no such kernel; empty if it has one.
  static std::string refusal(const ConvProblem& problem) { return Gather::refusal(problem); }

  // Sizes of the product and its splits. It needs `partial_elements` floats at `partial` to run.
  static ConvMmaBody make(const ConvProblem& problem, float* partial) {
    ConvMmaBody body{};
    body.gather = Gather::make(problem);
    body.loads = MmaLoad<kOp, Storage>::make(body.gather);
    const std::int32_t pairs = body.gather.taps * body.gather.channels;
    constexpr bool kByPairs = kOp == ConvOp::kWgrad;
    body.m_extent = kByPairs ? pairs : body.gather.positions;
    body.k_extent = kByPairs ? body.gather.positions : pairs;
    body.n_extent = static_cast<std::int32_t>(kOp == ConvOp::kDgrad ? problem.in_channels
                                                                    : problem.out_channels);
    const index_t tiles = problem.groups * body.m_tiles() * body.n_tiles();
    const index_t steps = ceil_div(body.k_extent, kDepth);
    const index_t wanted =
        std::min(ceil_div(kWantedBlocks, std::max<index_t>(tiles, 1)), steps / kStepsASplit);
    body.split_steps = static_cast<std::int32_t>(ceil_div(steps, std::max<index_t>(wanted, 1)));
    body.splits =
        static_cast<std::int32_t>(ceil_div(steps, std::max<index_t>(body.split_steps, 1)));
    body.partial = partial;
    return body;
  }

  index_t partial_elements() const {
    return splits < 2 ? 0 : splits * gather.problem.groups * m_extent * n_extent;
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

  PYDIST_HD std::int32_t m_tiles() const { return (m_extent + kRows - 1) / kRows; }
  PYDIST_HD std::int32_t n_tiles() const { return (n_extent + kColumns - 1) / kColumns; }
  PYDIST_HD index_t blocks() const {
    return gather.problem.groups * m_tiles() * n_tiles() * splits;  // no splits: nothing to add
  }
  PYDIST_HD index_t steps(index_t block) const {
    const std::int32_t rest = (k_extent + kDepth - 1) / kDepth - split(block) * split_steps;
    return rest < split_steps ? rest : split_steps;
  }

  // Fills the block's table of taps, finds the row that this thread gathers, and zeros its sums.
  PYDIST_HD void begin(index_t block, int thread, Thread& state, Table& table) const {
    for (int i = thread; i < gather.taps; i += kThreads) table.taps[i] = gather.tap(i);
    if constexpr (kOp != ConvOp::kWgrad) {
      const std::int32_t m = first_row(block) + thread;
      state.row = gather.place(gather.position(m < m_extent ? m : 0));
    }
    PYDIST_UNROLLED
    for (int i = 0; i < kTilesM * kTilesN; ++i) state.sums[i / kTilesN][i % kTilesN] = {};
  }

  // This thread's share of bringing step `step` of both sides into a stage.
  template <class Copies>
  PYDIST_HD void fetch(index_t block, index_t step, int thread, const Thread& state,
                       const Table& table, Stage& stage, Copies&& copies) const {
    const std::int32_t k = first_depth(block, step), g = group(block);
    const std::int32_t rows = m_extent - first_row(block), columns = n_extent - first_column(block);
    if constexpr (kOp == ConvOp::kWgrad) {
      loads.template gather_pairs<kRows>(gather, table.taps, g, {first_row(block), rows},
                                         {k, k_extent - k}, thread, stage.left);
      loads.template gradient<kColumns>(gather, g, {first_column(block), columns},
                                        {k, k_extent - k}, thread, stage.right);
    } else {
      loads.gather_place(gather, table.taps, g, state.row, thread < rows, {k, k_extent - k},
                         stage.left[thread], copies);
      loads.template weights<kColumns>(gather, table.taps, g, {first_column(block), columns},
                                       {k, k_extent - k}, thread, stage.right);
    }
  }

  // Reads this lane's words of a slice into fragments: lane = 4 * row (left) or column (right) +
  // word of k (see mma.hpp). With three products a word is also split into high and low part.
  PYDIST_HD void load(int slice, int thread, const Stage& stage, Thread& state) const {
    const int lane = thread % launch::kWarp, row = lane / 4, word = slice * kMmaWords + lane % 4;
    const int first = thread / launch::kWarp * kWarpRows;
    PYDIST_UNROLLED
    for (int i = 0; i < kTilesM; ++i) {
      const MmaRow* const rows = stage.left + first + i * kMmaRows + row;
      for (int part = 0; part < 4; ++part) {
        set(rows[part % 2 * 8].words[word + part / 2 * 4], state.left[i].words[part],
            state.left_low[kIsSplit ? i : 0].words[part]);
      }
    }
    PYDIST_UNROLLED
    for (int j = 0; j < kTilesN; ++j) {
      const MmaRow& column = stage.right[j * kMmaColumns + row];
      for (int part = 0; part < 2; ++part) {
        set(column.words[word + part * 4], state.right[j].words[part],
            state.right_low[kIsSplit ? j : 0].words[part]);
      }
    }
  }

  // The products of one warp and slice, without those whose result or operands are outside.
  template <class Warp>
  PYDIST_HD void multiply(index_t block, index_t step, int slice, int warp_index,
                          const Warp& warp) const {
    if (first_depth(block, step) + slice * kMmaWords * kPack >= k_extent) return;
    const std::int32_t row = first_row(block) + warp_index * kWarpRows;
    const std::int32_t column = first_column(block);
    PYDIST_UNROLLED
    for (int i = 0; i < kTilesM; ++i) {
      PYDIST_UNROLLED
      for (int j = 0; j < kTilesN; ++j) {
        if (row + i * kMmaRows >= m_extent || column + j * kMmaColumns >= n_extent) continue;
        const auto left = [i](const Thread& t) -> const auto& { return t.left[i]; };
        const auto right = [j](const Thread& t) -> const auto& { return t.right[j]; };
        const auto sum = [i, j](Thread& t) -> auto& { return t.sums[i][j]; };
        if constexpr (kIsSplit) {  // the small products first
          const auto left_low = [i](const Thread& t) -> const auto& { return t.left_low[i]; };
          const auto right_low = [j](const Thread& t) -> const auto& { return t.right_low[j]; };
          multiply_warp<kFormat>(warp, left_low, right, sum);
          multiply_warp<kFormat>(warp, left, right_low, sum);
        }
        multiply_warp<kFormat>(warp, left, right, sum);
      }
    }
  }

  // Adds this lane's sums to the target, or stores them as a part.
  PYDIST_HD void end(index_t block, int thread, const Thread& state) const {
    const int lane = thread % launch::kWarp;
    const std::int32_t row = first_row(block) + thread / launch::kWarp * kWarpRows + lane / 4;
    const std::int32_t column = first_column(block) + lane % 4 * 2;
    PYDIST_UNROLLED
    for (int part = 0; part < 2 * kTilesM; ++part) {  // lanes have rows in both halves of a product
      const std::int32_t m = row + part * 8;
      if (m >= m_extent) continue;
      const auto each = [&](const auto& f) {
        PYDIST_UNROLLED
        for (int j = 0; j < 2 * kTilesN; ++j) {
          const std::int32_t n = column + j / 2 * kMmaColumns + j % 2;
          if (n < n_extent) f(j, n, state.sums[part / 2][j / 2].values[part % 2 * 2 + j % 2]);
        }
      };
      if (splits > 1) {
        float* const sums = partial + partial_row(split(block), group(block), m);
        each([&](int, std::int32_t n, float sum) { sums[n] = sum; });
        continue;
      }
      // The row is read before its first element is written: one way to memory, not 2 kTilesN.
      Storage* const target = target_row(group(block), m);
      Storage before[2 * kTilesN]{};
      each([&](int j, std::int32_t n, float) { before[j] = target[n * target_stride()]; });
      each([&](int j, std::int32_t n, float sum) {
        target[n * target_stride()] = finished(before[j], sum);
      });
    }
  }

  // Element 0 of row m of the target, the stride of its elements, and the new value of one of them.
  PYDIST_HD Storage* target_row(std::int32_t g, std::int32_t m) const {
    const ConvProblem& p = gather.problem;
    if constexpr (kOp == ConvOp::kWgrad) {
      const std::int32_t tap = gather.channel_count.quotient(m);
      return static_cast<Storage*>(p.weight.data) + gather.tap(tap).weight +
             g * p.out_channels * p.weight.strides[0] +
             (m - tap * gather.channels) * p.weight.strides[1];
    } else {
      const SpatialArray& placed = gather.placed();
      return static_cast<Storage*>(placed.data) + gather.offset_of(gather.position(m)) +
             g * n_extent * placed.strides[1];
    }
  }
  PYDIST_HD index_t target_stride() const {
    return kOp == ConvOp::kWgrad ? gather.problem.weight.strides[0] : gather.placed().strides[1];
  }
  PYDIST_HD Storage finished(const Storage& before, float sum) const {
    return store_as<Storage>(load_as(before) + sum);
  }
  PYDIST_HD index_t partial_row(index_t split, index_t g, index_t m) const {
    return ((split * gather.problem.groups + g) * m_extent + m) * n_extent;
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

  // Blocks are counted over (split, group, tile of rows, tile of columns).
  PYDIST_HD std::int32_t split(index_t block) const {
    return static_cast<std::int32_t>(block) / n_tiles() / m_tiles() /
           static_cast<std::int32_t>(gather.problem.groups);
  }
  PYDIST_HD std::int32_t group(index_t block) const {
    return static_cast<std::int32_t>(block) / n_tiles() / m_tiles() %
           static_cast<std::int32_t>(gather.problem.groups);
  }
  PYDIST_HD std::int32_t first_row(index_t block) const {
    return static_cast<std::int32_t>(block) / n_tiles() % m_tiles() * kRows;
  }
  PYDIST_HD std::int32_t first_column(index_t block) const {
    return static_cast<std::int32_t>(block) % n_tiles() * kColumns;
  }
  PYDIST_HD std::int32_t first_depth(index_t block, index_t step) const {
    return (split(block) * split_steps + static_cast<std::int32_t>(step)) * kDepth;
  }
};

}  // namespace pydist::ops
