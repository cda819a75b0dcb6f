// Boundary convolution as a tiled product of gathered matrices: the body for devices and every
// dtype.
//
// Devices with tensor cores have another body (mma_body.hpp) for all dtypes except float64.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "launch/decomposition.hpp"
#include "ops/common/half.hpp"
#include "ops/conv/reach.hpp"

namespace pydist::ops {

// target[m, n] += sum_k left(m, k) * right(k, n) for each group of channels, with
//
//            m    n                     k                     left         right
//   forward  co   (sample, out index)   (ci, kernel index)    weight       in
//   dgrad    ci   (sample, in index)    (co, kernel index)    weight       out gradient
//   wgrad    co   (ci, kernel index)    (sample, out index)   out gradient in
//
// Index formula: in index = out index * stride + kernel index * dilation + base in each dim;
//   elements outside the arrays count as 0. Indices run only over the boxes that the slab reaches.
// Threads: a block of 256 makes a tile of 32 x 64; each step loads 16 k of both sides into shared
//   memory (neighboring threads, neighboring n), then each thread adds to 2 x 4 sums in registers.
// Traffic: (1/32 + 1/64) elements read per multiply-add, one read and one written per output.
// Proof: tests/native/test_conv.cpp emulates it against a plain loop, in three thread
//   orders, under the sanitizers; tests/gpu/test_kernels_gpu.py on a device.
// CPU code: another form (cpu_planes.cpp, cpu_wgrad.cpp); gathering single elements costs more on a
//   CPU than the products.
// Each sum is formed by one thread, in a fixed order: results are deterministic.
template <ConvOp kOp, class Storage>
struct ConvTileBody {
  using T = accumulator_t<Storage>;
  static constexpr int kThreads = 256;
  static constexpr int kRows = 32, kColumns = 64, kDepth = 16;
  static constexpr int kThreadRows = 2, kThreadColumns = 4;
  static constexpr int kLanesM = kRows / kThreadRows, kLanesN = kColumns / kThreadColumns;

  struct Shared {
    T left[kDepth][kRows + 1];  // one more: a column's loads hit different banks
    T right[kDepth][kColumns];
  };
  // An index along n or k, split: a channel or sample, and three spatial or kernel indices.
  struct Point {
    std::int32_t lead;  // below 0: outside
    std::int32_t at[kSpatialDims];
  };
  struct Thread {
    Point column;  // whose right side this thread loads
    T sums[kThreadRows][kThreadColumns];
  };

  ConvProblem problem;
  DimReach reach[kSpatialDims];
  std::int32_t m_extent, n_extent, k_extent;

  static ConvTileBody make(const ConvProblem& problem) {
    ConvTileBody body{problem, {}, 0, 0, 0};
    index_t outs = problem.batch, ins = problem.batch, taps = 1;
    for (int dim = 0; dim < kSpatialDims; ++dim) {
      const DimReach reach = reach_of(problem.dims[dim]);
      body.reach[dim] = reach;
      outs *= reach.out.count;
      ins *= reach.in.count;
      taps *= reach.kernel.count;
    }
    const index_t m = kOp == ConvOp::kDgrad ? problem.in_channels : problem.out_channels;
    const index_t n = kOp == ConvOp::kForward ? outs
                      : kOp == ConvOp::kDgrad ? ins
                                              : problem.in_channels * taps;
    const index_t k = kOp == ConvOp::kForward ? problem.in_channels * taps
                      : kOp == ConvOp::kDgrad ? problem.out_channels * taps
                                              : outs;
    const index_t blocks = problem.groups * ceil_div(m, kRows) * ceil_div(n, kColumns);
    const index_t limit = std::numeric_limits<std::int32_t>::max() - kColumns;
    PYDIST_EXPECT(m <= limit && n <= limit && k <= limit && blocks <= limit,
                  "boundary convolution with " + std::to_string(n) + " columns and " +
                      std::to_string(k) + " products an element: at most 2^31 are possible");
    body.m_extent = static_cast<std::int32_t>(m);
    body.n_extent = static_cast<std::int32_t>(n);
    body.k_extent = static_cast<std::int32_t>(k);
    return body;
  }

  PYDIST_HD std::int32_t m_blocks() const { return (m_extent + kRows - 1) / kRows; }
  PYDIST_HD std::int32_t n_blocks() const { return (n_extent + kColumns - 1) / kColumns; }

  PYDIST_HD index_t blocks() const {
    return k_extent == 0 ? 0 : problem.groups * m_blocks() * n_blocks();
  }
  PYDIST_HD index_t steps(index_t) const { return (k_extent + kDepth - 1) / kDepth; }

  // Each thread loads one column of the right side in all steps, so it splits that index once.
  PYDIST_HD void begin(index_t block, int thread, Thread& state) const {
    state.column = column_point(first_column(block) + thread % kColumns);
    for (int i = 0; i < kThreadRows; ++i) {
      for (int j = 0; j < kThreadColumns; ++j) state.sums[i][j] = T{};
    }
  }

  PYDIST_HD void load(index_t block, index_t step, int thread, const Thread& state,
                      Shared& shared) const {
    const auto first = static_cast<std::int32_t>(step) * kDepth;
    for (int d = thread / kColumns; d < kDepth; d += kThreads / kColumns) {
      shared.right[d][thread % kColumns] =
          right(group(block), depth_point(first + d), state.column);
    }
    // Along k first: the weights of a row are contiguous in k.
    for (int i = thread; i < kRows * kDepth; i += kThreads) {
      shared.left[i % kDepth][i / kDepth] =
          left(group(block), first_row(block) + i / kDepth, depth_point(first + i % kDepth));
    }
  }

  PYDIST_HD void compute(int thread, const Shared& shared, Thread& state) const {
    const int m = thread / kLanesN, n = thread % kLanesN;
    for (int d = 0; d < kDepth; ++d) {
      for (int i = 0; i < kThreadRows; ++i) {
        for (int j = 0; j < kThreadColumns; ++j) {
          state.sums[i][j] += shared.left[d][m + i * kLanesM] * shared.right[d][n + j * kLanesN];
        }
      }
    }
  }

  // Adds the sums to the target.
  PYDIST_HD void end(index_t block, int thread, const Thread& state) const {
    for (int j = 0; j < kThreadColumns; ++j) {
      const Point column = column_point(first_column(block) + thread % kLanesN + j * kLanesN);
      for (int i = 0; i < kThreadRows; ++i) {
        const std::int32_t m = first_row(block) + thread / kLanesN + i * kLanesM;
        if (m >= m_extent || column.lead < 0) continue;
        Storage& element = target(group(block), m, column);
        element = store_as<Storage>(load_as(element) + state.sums[i][j]);
      }
    }
  }

 private:
  PYDIST_HD std::int32_t group(index_t block) const {
    return static_cast<std::int32_t>(block) / (m_blocks() * n_blocks());
  }
  PYDIST_HD std::int32_t first_row(index_t block) const {
    return static_cast<std::int32_t>(block) / n_blocks() % m_blocks() * kRows;
  }
  PYDIST_HD std::int32_t first_column(index_t block) const {
    return static_cast<std::int32_t>(block) % n_blocks() * kColumns;
  }

  // Splits index `i` over (lead, the reached indices of three dims); beyond the extent, lead < 0.
  template <Reach DimReach::* kReach>
  PYDIST_HD Point take_apart(std::int32_t i, std::int32_t extent) const {
    Point point{-1, {0, 0, 0}};
    if (i >= extent) return point;
    for (int dim = kSpatialDims - 1; dim >= 0; --dim) {
      const Reach range = reach[dim].*kReach;
      point.at[dim] = range.first + i % range.count;
      i /= range.count;
    }
    point.lead = i;
    return point;
  }
  PYDIST_HD Point column_point(std::int32_t n) const {
    if constexpr (kOp == ConvOp::kForward) return take_apart<&DimReach::out>(n, n_extent);
    if constexpr (kOp == ConvOp::kDgrad) return take_apart<&DimReach::in>(n, n_extent);
    if constexpr (kOp == ConvOp::kWgrad) return take_apart<&DimReach::kernel>(n, n_extent);
  }
  PYDIST_HD Point depth_point(std::int32_t k) const {
    if constexpr (kOp == ConvOp::kWgrad) return take_apart<&DimReach::out>(k, k_extent);
    return take_apart<&DimReach::kernel>(k, k_extent);
  }

  // Element (m, k) of the left side and (k, n) of the right one, as in the table above; 0 outside.
  PYDIST_HD T left(std::int32_t g, std::int32_t m, const Point& depth) const {
    if (m >= m_extent || depth.lead < 0) return T{};
    if constexpr (kOp == ConvOp::kWgrad) return load_as(out_at(g, m, depth));
    if constexpr (kOp == ConvOp::kForward) return load_as(weight_at(g, m, depth.lead, depth.at));
    if constexpr (kOp == ConvOp::kDgrad) return load_as(weight_at(g, depth.lead, m, depth.at));
  }

  PYDIST_HD T right(std::int32_t g, const Point& depth, const Point& column) const {
    if (depth.lead < 0 || column.lead < 0) return T{};
    if constexpr (kOp == ConvOp::kForward) {
      return gather_in(g, column.lead, depth.lead, column.at, depth.at);
    }
    if constexpr (kOp == ConvOp::kWgrad) {
      return gather_in(g, depth.lead, column.lead, depth.at, column.at);
    }
    if constexpr (kOp == ConvOp::kDgrad) return gather_out(g, depth, column);
  }

  PYDIST_HD T gather_in(std::int32_t g, std::int32_t sample, std::int32_t ci,
                        const std::int32_t* out, const std::int32_t* kernel) const {
    Point in{sample, {0, 0, 0}};
    for (int dim = 0; dim < kSpatialDims; ++dim) {
      const ConvDim& d = problem.dims[dim];
      const index_t i = out[dim] * d.stride + kernel[dim] * d.dilation + d.base;
      if (i < 0 || i >= d.in_extent) return T{};
      in.at[dim] = static_cast<std::int32_t>(i);
    }
    return load_as(in_at(g, ci, in));
  }

  PYDIST_HD T gather_out(std::int32_t g, const Point& depth, const Point& in) const {
    Point out{in.lead, {0, 0, 0}};
    for (int dim = 0; dim < kSpatialDims; ++dim) {
      const ConvDim& d = problem.dims[dim];
      const index_t steps = in.at[dim] - depth.at[dim] * d.dilation - d.base;
      const index_t o = steps / d.stride;
      if (steps < 0 || o * d.stride != steps || o >= d.out_extent) return T{};
      out.at[dim] = static_cast<std::int32_t>(o);
    }
    return load_as(out_at(g, depth.lead, out));
  }

  PYDIST_HD Storage& target(std::int32_t g, std::int32_t m, const Point& column) const {
    if constexpr (kOp == ConvOp::kForward) return out_at(g, m, column);
    if constexpr (kOp == ConvOp::kDgrad) return in_at(g, m, column);
    if constexpr (kOp == ConvOp::kWgrad) return weight_at(g, m, column.lead, column.at);
  }

  static PYDIST_HD Storage& element(const SpatialArray& array, index_t first, index_t second,
                                    const std::int32_t* at) {
    index_t offset = first * array.strides[0] + second * array.strides[1];
    for (int dim = 0; dim < kSpatialDims; ++dim) offset += at[dim] * array.strides[2 + dim];
    return static_cast<Storage*>(array.data)[offset];
  }
  PYDIST_HD Storage& in_at(std::int32_t g, index_t ci, const Point& point) const {
    return element(problem.in, point.lead, g * problem.in_channels + ci, point.at);
  }
  PYDIST_HD Storage& out_at(std::int32_t g, index_t co, const Point& point) const {
    return element(problem.out, point.lead, g * problem.out_channels + co, point.at);
  }
  PYDIST_HD Storage& weight_at(std::int32_t g, index_t co, index_t ci,
                               const std::int32_t* kernel) const {
    return element(problem.weight, g * problem.out_channels + co, ci, kernel);
  }
};

}  // namespace pydist::ops
