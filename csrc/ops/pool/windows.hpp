// Pooling windows in local indices, for sums and maxima: along one dim, and as rows of threads.
//
// Output o of a dim reads the inputs first_of(o) + k * dilation, 0 <= k < kernel, where
//   first_of(o) = o * stride + base,  base = out_lo * stride - padding - in_lo
// and for adaptive windows floor((o + out_lo) * inputs / outputs) - in_lo up to the ceiling of the
// next one. in_lo and out_lo are the global positions of the arrays: a shard, or a slab of another
// rank. Inputs of a window outside the given array belong to another array, or are padding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "core/footprint.hpp"
#include "launch/host_device.hpp"
#include "ops/common/array.hpp"
#include "ops/common/divisor.hpp"
#include "ops/common/vector.hpp"

namespace pydist::ops {

// The written array: the outputs, or (for the adjoint) the inputs' gradient.
enum class PoolOp { kForward, kBackward };

// Indices [begin, end) along one dim.
template <class Index>
struct BasicSpan {
  Index begin, end;

  PYDIST_HD Index size() const { return end - begin; }
};
using Span = BasicSpan<index_t>;

// The inputs first + k * dilation, begin <= k < end, of one output: those inside the array.
template <class Index>
struct TapSpan {
  Index first, begin, end;
};

// Quotients of indices by a stride. For 32 bits, as on devices, by a product (Divisor): each
// element needs some, and a division would take longer than its memory accesses.
template <class Index>
struct StrideDivisor {
  PYDIST_HD Index quotient(Index index, Index stride) const { return index / stride; }
};
template <>
struct StrideDivisor<std::int32_t> {
  Divisor divisor;

  PYDIST_HD std::int32_t quotient(std::int32_t index, std::int32_t) const {
    return divisor.quotient(index);
  }
};

// One spatial dim of a Footprint: output o reads the inputs first_of(o) + k * dilation. Inputs and
// outputs outside the given arrays are ignored.
template <class Index>
struct BasicPoolDim {
  using Span = BasicSpan<Index>;
  Index base;                      // out_lo * stride - padding - in_lo; adaptive: -in_lo
  Index stride, dilation, kernel;  // adaptive: the longest window's kernel
  Index in_extent, out_extent;
  Index inputs, outputs, out_lo;  // of adaptive windows: the domain's extents; else 0
  const double* scale;            // [out_extent], of sums
  StrideDivisor<Index> by_stride;

  PYDIST_HD bool is_adaptive() const { return outputs > 0; }
  PYDIST_HD Index first_of(Index o) const {
    return is_adaptive() ? (o + out_lo) * inputs / outputs + base : o * stride + base;
  }
  PYDIST_HD Index end_of(Index o) const {
    if (is_adaptive()) return ((o + out_lo + 1) * inputs + outputs - 1) / outputs + base;
    return first_of(o) + span();
  }
  PYDIST_HD Span inputs_of(Index o) const {
    return {clip(first_of(o), in_extent), clip(end_of(o), in_extent)};
  }
  // The outputs whose window spans the input; with dilation, it may be between two taps.
  PYDIST_HD Span outputs_of(Index i) const {
    if (is_adaptive()) {
      const Index global = i - base;
      return {clip(global * outputs / inputs - out_lo, out_extent),
              clip(((global + 1) * outputs + inputs - 1) / inputs - out_lo, out_extent)};
    }
    return {outputs_up_to(i - base - span()), outputs_up_to(i - base)};
  }
  PYDIST_HD TapSpan<Index> taps_of(Index o) const {
    const Index first = first_of(o), count = is_adaptive() ? end_of(o) - first : kernel;
    const Index begin = first < 0 ? taps_over(-first) : 0;
    const Index end = first < in_extent ? taps_over(in_extent - first) : 0;
    return {first, begin, end < count ? end : count};
  }

  template <PoolOp kOp>
  PYDIST_HD Index targets() const {
    return kOp == PoolOp::kForward ? out_extent : in_extent;
  }
  // The sources of target `index`: inputs of an output forward, outputs of an input backward.
  template <PoolOp kOp>
  PYDIST_HD Span sources_of(Index index) const {
    if constexpr (kOp == PoolOp::kForward) return inputs_of(index);
    if constexpr (kOp == PoolOp::kBackward) return outputs_of(index);
  }
  // From the first to the last target that has any source in the given array.
  template <PoolOp kOp>
  PYDIST_HD Span reached() const {
    if (in_extent == 0 || out_extent == 0) return {0, 0};
    if constexpr (kOp == PoolOp::kForward) {
      return {outputs_of(0).begin, outputs_of(in_extent - 1).end};
    } else {
      return {inputs_of(0).begin, inputs_of(out_extent - 1).end};
    }
  }

 private:
  PYDIST_HD Index span() const { return (kernel - 1) * dilation + 1; }
  // The number of taps that start within a distance above 0.
  PYDIST_HD Index taps_over(Index distance) const {
    return dilation == 1 ? distance : (distance - 1) / dilation + 1;
  }
  // The number of outputs of the array whose window begins at or before a position.
  PYDIST_HD Index outputs_up_to(Index position) const {
    return position < 0 ? 0 : clip(by_stride.quotient(position, stride) + 1, out_extent);
  }
  static PYDIST_HD Index clip(Index index, Index extent) {
    return index < 0 ? 0 : index > extent ? extent : index;
  }
};
using PoolDim = BasicPoolDim<index_t>;

// The windows of a pooling and the global position of its two arrays.
struct PoolAttributes {
  Coords in_lo, out_lo;
  std::vector<Footprint> footprints;  // one per dim
};

// One spatial dim of a pooling, without scales. Refuses positions whose indices overflow, and
// arrays that leave the domain of adaptive windows.
inline PoolDim pool_dim(const PoolAttributes& attributes, int dim, index_t in_extent,
                        index_t out_extent) {
  const Footprint& footprint = attributes.footprints[static_cast<std::size_t>(dim)];
  const index_t in_lo = attributes.in_lo[dim], out_lo = attributes.out_lo[dim];
  const index_t stride = footprint.stride(), kernel = footprint.kernel();
  if (footprint.is_adaptive()) {
    PYDIST_EXPECT(in_lo >= 0 && checked_add(in_lo, in_extent) <= footprint.inputs() &&
                      out_lo >= 0 && checked_add(out_lo, out_extent) <= footprint.outputs(),
                  "inputs at " + to_string(attributes.in_lo) + " or outputs at " +
                      to_string(attributes.out_lo) + " leave the domain of adaptive windows");
    return {
        -in_lo, stride,  1, kernel, in_extent, out_extent, footprint.inputs(), footprint.outputs(),
        out_lo, nullptr, {}};
  }
  const index_t base =
      checked_sub(checked_sub(checked_mul(out_lo, stride), footprint.padding_lo()), in_lo);
  const index_t span = checked_add(checked_mul(kernel - 1, footprint.dilation()), 1);
  checked_sub(checked_sub(0, base), span);
  checked_sub(in_extent, base);
  checked_add(checked_add(checked_mul(out_extent, stride), base), span);
  return {base, stride, footprint.dilation(), kernel, in_extent, out_extent, 0, 0, 0, nullptr, {}};
}

// 32 bits, for devices, where a division of 64 bits is a call that needs registers. Refuses larger
// values.
inline std::int32_t shorten(index_t value) {
  PYDIST_EXPECT(std::abs(value) <= std::numeric_limits<std::int32_t>::max(),
                "a pooling with " + std::to_string(value) +
                    " rows or positions along a dim is too large for a device");
  return static_cast<std::int32_t>(value);
}

inline BasicPoolDim<std::int32_t> shorten(const PoolDim& dim) {
  const index_t span = (dim.kernel - 1) * dim.dilation + 1 + std::abs(dim.base);
  shorten(dim.out_extent * dim.stride + span);
  shorten(dim.in_extent + span);
  shorten((dim.inputs + 1) * (dim.outputs + 1));
  return {shorten(dim.base),   shorten(dim.stride),      shorten(dim.dilation),
          shorten(dim.kernel), shorten(dim.in_extent),   shorten(dim.out_extent),
          shorten(dim.inputs), shorten(dim.outputs),     shorten(dim.out_lo),
          dim.scale,           {Divisor::by(dim.stride)}};
}

// Whether vectors of adjacent channels can be accessed in an array of such extents (channels-last).
inline void fit_channels(VectorFit& fit, const SpatialArray& array, index_t size,
                         const index_t (&shape)[2 + kSpatialDims]) {
  fit.fits = fit.fits && array.strides[1] == 1;
  fit.multiple(shape[1]).address(array.data, size);
  for (int dim = 0; dim < 2 + kSpatialDims; ++dim) {
    if (dim != 1 && shape[dim] > 1) fit.multiple(array.strides[dim]);
  }
}

// The rows on a device. Neighboring lanes write neighboring elements: if channels are adjacent in
// the target (channels-last), a run consists of the channels of all positions along the width, in
// vectors; else of the positions along the width of one channel.
//
// Row number = C-order index over (sample, channel unless channels-last, z, y).
struct PoolLanes {
  std::int32_t first[2 + kSpatialDims], extent[2 + kSpatialDims];  // of the targets
  Divisor extents[2 + kSpatialDims];
  Divisor vectors;  // of channels, of one position of a run
  std::int32_t vector_elements;
  std::int32_t row_count;
  bool along_channels;

  struct Position {
    std::int32_t sample, channel, z, y, x;  // of a run's first lane
  };

  // `elements` of a vector: above 1 only if the channels of all arrays are adjacent.
  static PoolLanes make(index_t batch, index_t channels, const Span (&targets)[kSpatialDims],
                        const SpatialArray& target, int elements) {
    PoolLanes lanes{};
    lanes.along_channels = target.strides[1] == 1 && channels > 1;
    lanes.extent[0] = shorten(batch);
    lanes.extent[1] = shorten(channels);
    for (int dim = 0; dim < kSpatialDims; ++dim) {
      lanes.first[2 + dim] = shorten(targets[dim].begin);
      lanes.extent[2 + dim] = shorten(targets[dim].size());
    }
    for (int dim = 0; dim < 2 + kSpatialDims; ++dim) {
      lanes.extents[dim] = Divisor::by(std::max(lanes.extent[dim], 1));
    }
    lanes.vector_elements = elements;
    lanes.vectors = Divisor::by(lanes.along_channels ? channels / elements : 1);
    index_t rows = lanes.run_length() == 0 ? 0 : 1;
    for (int dim = 0; dim < 2 + kSpatialDims; ++dim) {
      if (dim != 4 && !(dim == 1 && lanes.along_channels)) {
        rows = checked_mul(rows, lanes.extent[dim]);
      }
    }
    lanes.row_count = shorten(rows);
    shorten(lanes.run_length());
    return lanes;
  }

  PYDIST_HD index_t run_length() const { return index_t{extent[4]} * vectors.divisor; }

  PYDIST_HD Position position(index_t row) const {
    auto rest = static_cast<std::int32_t>(row);
    const auto take = [this, &rest](int dim) {  // splits the index along a dim off `rest`
      const std::int32_t above = extents[dim].quotient(rest);
      const std::int32_t index = first[dim] + (rest - above * extent[dim]);
      rest = above;
      return index;
    };
    const std::int32_t y = take(3), z = take(2), channel = along_channels ? 0 : take(1);
    return {rest, channel, z, y, first[4]};
  }

  // Piece j of a run: its position along the width, and its channel, counted from the run's.
  struct Piece {
    std::int32_t x, channel;
  };
  PYDIST_HD Piece piece(index_t j) const {
    const auto piece = static_cast<std::int32_t>(j);
    const std::int32_t x = vectors.quotient(piece);
    return {first[4] + x, (piece - x * vectors.divisor) * vector_elements};
  }
};

}  // namespace pydist::ops
