// The addresses of the gathered operand of a boundary convolution (tensor-core kernels).
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "ops/common/divisor.hpp"
#include "ops/conv/reach.hpp"

namespace pydist::ops {

// A boundary convolution as a product: target[p or q, n] += sum left * right, where "left" is
// gathered from an array by a position p and by a pair q of a kernel index and a channel:
//
//            rows       sum over   columns   left gathered from   right
//   forward  p: outputs q: taps,ci co        in                   weight
//   dgrad    p: inputs  q: taps,co ci        out gradient         weight
//   wgrad    q: taps,ci p: outputs co        in                   out gradient
//
// Positions are counted over (sample, the reached indices of three dims), pairs over (reached
// kernel indices, channel): the channel varies fastest, so that one kernel index serves many
// neighbors. Where instead the kernel indices of a weight are adjacent in memory and the channels
// of the gathered array are not, the kernel index varies fastest (forward and dgrad).
//
// The work per element is split: the part that depends only on the position (Anchor) is computed
// once per thread and tile, the part that depends only on the kernel index (Tap) once per block,
// into a table in shared memory. find() combines them: three bounds checks, and for dgrad three
// divisions by the stride (Divisor).
template <ConvOp kOp>
struct ConvGather {
  static constexpr int kMaxTaps = 128;  // kernel indices that a slab may reach

  // A position for find(): dgrad, the input index - base; else the output index * stride + base.
  // The offset of the sample and, except for dgrad, of `at`.
  struct Anchor {
    std::int32_t at[kSpatialDims];
    index_t offset;
  };
  struct Position {
    std::int32_t sample, at[kSpatialDims];
  };
  // A kernel index: its shift of an anchor, in indices and in elements, and the offset of its
  // weights.
  struct Tap {
    std::int32_t shift[kSpatialDims];
    index_t offset, weight;
  };

  struct Pair {
    std::int32_t tap, channel;
  };

  ConvProblem problem;
  DimReach reach[kSpatialDims];
  std::int32_t positions, taps, channels;  // of one group
  bool taps_inside;                        // of pairs, the kernel index varies fastest
  Divisor pair_count, extents[kSpatialDims], strides[kSpatialDims], kernels[kSpatialDims];

  // The reason why a problem has no such kernel; empty if it has one.
  static std::string refusal(const ConvProblem& problem) {
    constexpr index_t kLimit = std::numeric_limits<std::int32_t>::max() / 4;
    index_t positions = problem.batch, taps = 1;
    for (const ConvDim& dim : problem.dims) {
      const DimReach reach = reach_of(dim);
      taps *= reach.kernel.count;
      positions *= (kOp == ConvOp::kDgrad ? reach.in : reach.out).count;
      const index_t far = std::max({dim.in_extent, dim.out_extent * dim.stride,
                                    dim.kernel * dim.dilation, dim.base, -dim.base});
      if (far > kLimit) return "indices of " + std::to_string(far);
    }
    if (taps > kMaxTaps) return std::to_string(taps) + " kernel indices, above 128";
    const index_t pairs = taps * std::max(problem.in_channels, problem.out_channels);
    if (positions > kLimit || pairs > kLimit) {
      return std::to_string(std::max(positions, pairs)) + " products an element";
    }
    return "";
  }

  // `problem` must not be refused.
  static ConvGather make(const ConvProblem& problem) {
    ConvGather gather{};
    gather.problem = problem;
    index_t positions = problem.batch;
    gather.taps = 1;
    for (int dim = 0; dim < kSpatialDims; ++dim) {
      const DimReach reach = reach_of(problem.dims[dim]);
      const Reach box = kOp == ConvOp::kDgrad ? reach.in : reach.out;
      gather.reach[dim] = reach;
      gather.taps *= reach.kernel.count;
      positions *= box.count;
      gather.extents[dim] = Divisor::by(std::max(box.count, 1));
      gather.strides[dim] = Divisor::by(problem.dims[dim].stride);
      gather.kernels[dim] = Divisor::by(std::max(reach.kernel.count, 1));
    }
    gather.positions = static_cast<std::int32_t>(positions);
    gather.channels = static_cast<std::int32_t>(kOp == ConvOp::kDgrad ? problem.out_channels
                                                                      : problem.in_channels);
    const index_t* const weight = problem.weight.strides;
    gather.taps_inside = kOp != ConvOp::kWgrad && gather.source().strides[1] != 1 &&
                         weight[1 + kSpatialDims] < weight[kOp == ConvOp::kForward ? 1 : 0];
    const std::int32_t inside = gather.taps_inside ? gather.taps : gather.channels;
    gather.pair_count = Divisor::by(std::max(inside, 1));
    return gather;
  }

  PYDIST_HD const SpatialArray& source() const {
    return kOp == ConvOp::kDgrad ? problem.out : problem.in;
  }
  // The array that positions index: the target of forward and dgrad.
  PYDIST_HD const SpatialArray& placed() const {
    return kOp == ConvOp::kDgrad ? problem.in : problem.out;
  }

  // Position number i: three divisions.
  PYDIST_HD Position position(std::int32_t i) const {
    Position position;
    for (int dim = kSpatialDims - 1; dim >= 0; --dim) {
      const std::int32_t rest = extents[dim].quotient(i);
      const Reach box = kOp == ConvOp::kDgrad ? reach[dim].in : reach[dim].out;
      position.at[dim] = box.first + (i - rest * extents[dim].divisor);
      i = rest;
    }
    position.sample = i;
    return position;
  }

  // Pair number i: one division.
  PYDIST_HD Pair pair(std::int32_t i) const {
    const std::int32_t outside = pair_count.quotient(i);
    const std::int32_t inside = i - outside * pair_count.divisor;
    return taps_inside ? Pair{inside, outside} : Pair{outside, inside};
  }

  PYDIST_HD index_t offset_of(const Position& position) const {
    const SpatialArray& array = placed();
    index_t offset = position.sample * array.strides[0];
    for (int dim = 0; dim < kSpatialDims; ++dim) {
      offset += position.at[dim] * array.strides[2 + dim];
    }
    return offset;
  }

  PYDIST_HD Anchor anchor(const Position& position) const {
    Anchor anchor{{}, position.sample * source().strides[0]};
    for (int dim = 0; dim < kSpatialDims; ++dim) {
      const ConvDim& d = problem.dims[dim];
      if constexpr (kOp == ConvOp::kDgrad) {
        anchor.at[dim] = position.at[dim] - static_cast<std::int32_t>(d.base);
      } else {
        anchor.at[dim] = position.at[dim] * static_cast<std::int32_t>(d.stride) +
                         static_cast<std::int32_t>(d.base);
        anchor.offset += anchor.at[dim] * source().strides[2 + dim];
      }
    }
    return anchor;
  }

  PYDIST_HD Tap tap(std::int32_t i) const {
    Tap tap{{}, 0, 0};
    for (int dim = kSpatialDims - 1; dim >= 0; --dim) {
      const std::int32_t rest = kernels[dim].quotient(i);
      const std::int32_t k = reach[dim].kernel.first + (i - rest * kernels[dim].divisor);
      i = rest;
      const auto shift = k * static_cast<std::int32_t>(problem.dims[dim].dilation);
      tap.shift[dim] = kOp == ConvOp::kDgrad ? -shift : shift;
      tap.offset += shift * source().strides[2 + dim];
      tap.weight += k * problem.weight.strides[2 + dim];
    }
    return tap;
  }

  // Whether an anchor and a tap have an element; `offset` becomes the offset of its channel 0.
  PYDIST_HD bool find(const Anchor& anchor, const Tap& tap, index_t& offset) const {
    bool inside = true;
    if constexpr (kOp == ConvOp::kDgrad) {
      offset = anchor.offset;
      for (int dim = 0; dim < kSpatialDims; ++dim) {
        const std::int32_t steps = anchor.at[dim] + tap.shift[dim];
        const std::int32_t o = strides[dim].quotient(steps < 0 ? 0 : steps);
        inside = inside && o * strides[dim].divisor == steps && o < problem.dims[dim].out_extent;
        offset += o * source().strides[2 + dim];
      }
    } else {
      for (int dim = 0; dim < kSpatialDims; ++dim) {
        const auto i = static_cast<std::uint32_t>(anchor.at[dim] + tap.shift[dim]);
        inside = inside && i < static_cast<std::uint32_t>(problem.dims[dim].in_extent);
      }
      offset = anchor.offset + tap.offset;
    }
    return inside;
  }
};

}  // namespace pydist::ops
