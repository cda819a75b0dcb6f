// Maxima over pooling windows and their taps: the definition, and the bodies for devices.
#pragma once

#include <cstdint>
#include <limits>

#include "core/view.hpp"
#include "launch/run_body.hpp"
#include "ops/common/half.hpp"
#include "ops/pool/windows.hpp"

namespace pydist::ops {

// Forward: the maxima and their taps. Backward: the inputs' gradient from the outputs'. Pick, its
// adjoint: the inputs at the taps.
enum class MaxOp { kForward, kBackward, kPick };

// out[n, c, o] = max of in[n, c, i] over the inputs i of window o, and taps[n, c, o] the number
// (k_d * kernel_h + k_h) * kernel_w + k_w of the maximum; kNoTap<Tap> where `in` holds none.
//
// The choice is torch's: the last of NaNs, else the first of equal maxima. It depends only on
// values and tap numbers, so the results of several arrays (a shard and slabs) can be merged in any
// order; -inf with kNoTap is neutral. With `accumulate`, forward merges with the values of `out`
// and `taps`, and pick keeps targets whose tap is not in `in`; else the full target is written.
struct MaxProblem {
  DType dtype, tap_dtype;  // the taps': uint8 or int32
  index_t batch, channels;
  PoolDim dims[kSpatialDims];
  SpatialArray in, out, taps;
  bool accumulate;

  template <MaxOp kOp>
  Span targets(int dim) const {
    const PoolDim& along = dims[dim];
    if constexpr (kOp == MaxOp::kBackward) return {0, along.in_extent};
    return accumulate ? along.reached<PoolOp::kForward>() : Span{0, along.out_extent};
  }
};

template <class Tap>
inline constexpr Tap kNoTap = std::numeric_limits<Tap>::max();

// The views must have passed the border's checks, and Tap must hold all taps of a window.
inline MaxProblem max_problem(const TensorView& in, const TensorView& out, const TensorView& taps,
                              const PoolAttributes& attributes, bool accumulate) {
  MaxProblem problem{};
  problem.dtype = in.dtype;
  problem.tap_dtype = taps.dtype;
  problem.batch = in.shape[0];
  problem.channels = in.shape[1];
  problem.accumulate = accumulate;
  for (int dim = 0; dim < kSpatialDims; ++dim) {
    problem.dims[dim] = pool_dim(attributes, dim, in.shape[2 + dim], out.shape[2 + dim]);
  }
  problem.in = spatial_array(in);
  problem.out = spatial_array(out);
  problem.taps = spatial_array(taps);
  return problem;
}

// A maximum and the number of its tap.
template <class T, class Tap>
struct Maximum {
  T value;
  Tap tap;

  // Whether torch would take `other` of the two.
  PYDIST_HD bool yields_to(const Maximum& other) const {
    const bool nan = value != value, other_nan = other.value != other.value;
    if (nan || other_nan) return other_nan && (!nan || other.tap > tap);
    return other.value > value || (other.value == value && other.tap < tap);
  }
};

// One target of MaxProblem per thread, in a fixed order.
//
// Index formula: forward, of MaxProblem. Backward, in[i] = sum of out[o] over the outputs o whose
//   window contains i and whose tap is i: a gather, without atomics. Pick, out[o] =
//   in[tap of o].
// Threads: rows and lanes as in PoolLanes.
// Traffic: forward reads each source kernel volume / stride volume times (mostly from caches),
//   backward as often a gradient and its tap; each target is written once.
// Proof: tests/native/test_pool_max.cpp emulates it against a plain loop, in three thread orders.
// CPU code: this body for pick; forward goes tap by tap over whole lines (cpu_max.cpp), backward
//   scatters (cpu_max_spread.hpp).
template <MaxOp kOp, class Storage, class Tap>
struct MaxBody {
  using T = accumulator_t<Storage>;
  using Position = PoolLanes::Position;
  BasicPoolDim<std::int32_t> dims[kSpatialDims];
  PoolLanes lanes;
  SpatialArray in, out, taps;
  bool accumulate;

  static MaxBody make(const MaxProblem& problem) {
    MaxBody body{};
    body.in = problem.in;
    body.out = problem.out;
    body.taps = problem.taps;
    body.accumulate = problem.accumulate;
    Span targets[kSpatialDims];
    for (int dim = 0; dim < kSpatialDims; ++dim) {
      body.dims[dim] = shorten(problem.dims[dim]);
      targets[dim] = problem.targets<kOp>(dim);
    }
    const SpatialArray& target = kOp == MaxOp::kBackward ? problem.in : problem.out;
    body.lanes = PoolLanes::make(problem.batch, problem.channels, targets, target);
    return body;
  }

  PYDIST_HD index_t run_length() const { return lanes.run_length(); }
  PYDIST_HD index_t rows() const { return lanes.row_count; }
  PYDIST_HD Position row(index_t r) const { return lanes.position(r); }

  template <class Loop>
  PYDIST_HD void each(const Position& run, const Loop& loop) const {
    loop(run_length(), [this, run](index_t j) {
      Position at = run;
      (lanes.along_channels ? at.channel : at.x) += static_cast<std::int32_t>(j);
      if constexpr (kOp == MaxOp::kForward) forward(at);
      if constexpr (kOp == MaxOp::kBackward) backward(at);
      if constexpr (kOp == MaxOp::kPick) pick(at);
    });
  }

 private:
  using Taps = TapSpan<std::int32_t>;

  template <class Element>
  static PYDIST_HD Element* element(const SpatialArray& array, const Position& at) {
    return static_cast<Element*>(array.data) + at.sample * array.strides[0] +
           at.channel * array.strides[1] + at.z * array.strides[2] + at.y * array.strides[3] +
           at.x * array.strides[4];
  }

  PYDIST_HD void forward(const Position& at) const {
    const Taps depth = dims[0].taps_of(at.z), height = dims[1].taps_of(at.y);
    const Taps width = dims[2].taps_of(at.x);
    Maximum<T, Tap> best{-std::numeric_limits<T>::infinity(), kNoTap<Tap>};
    const auto first = [this](const Taps& taps, int dim) {
      return taps.first + taps.begin * dims[dim].dilation;
    };
    const auto step = [this](int dim) { return dims[dim].dilation * in.strides[2 + dim]; };
    const Storage* plane = element<const Storage>(
        in, {at.sample, at.channel, first(depth, 0), first(height, 1), first(width, 2)});
    PYDIST_ROLLED
    for (std::int32_t i = depth.begin; i < depth.end; ++i, plane += step(0)) {
      const Storage* line = plane;
      PYDIST_ROLLED
      for (std::int32_t j = height.begin; j < height.end; ++j, line += step(1)) {
        const Storage* from = line;
        PYDIST_ROLLED
        for (std::int32_t k = width.begin; k < width.end; ++k, from += step(2)) {
          const T value = load_as(*from);
          const auto tap = static_cast<Tap>((i * dims[1].kernel + j) * dims[2].kernel + k);
          if (best.yields_to({value, tap})) best = {value, tap};
        }
      }
    }
    Storage& value = *element<Storage>(out, at);
    Tap& tap = *element<Tap>(taps, at);
    if (accumulate && !Maximum<T, Tap>{load_as(value), tap}.yields_to(best)) return;
    value = store_as<Storage>(best.value);
    tap = best.tap;
  }

  // The number of the tap along a dim through which output o reads input i, or -1.
  static PYDIST_HD std::int32_t tap_of(const BasicPoolDim<std::int32_t>& dim, std::int32_t o,
                                       std::int32_t i) {
    const std::int32_t distance = i - dim.first_of(o);
    if (dim.dilation == 1) return distance;
    return distance % dim.dilation == 0 ? distance / dim.dilation : -1;
  }

  PYDIST_HD void backward(const Position& at) const {
    const auto depth = dims[0].outputs_of(at.z), height = dims[1].outputs_of(at.y);
    const auto width = dims[2].outputs_of(at.x);
    T sum{};
    PYDIST_ROLLED
    for (std::int32_t z = depth.begin; z < depth.end; ++z) {
      const std::int32_t i = tap_of(dims[0], z, at.z);
      PYDIST_ROLLED
      for (std::int32_t y = height.begin; y < height.end; ++y) {
        const std::int32_t j = tap_of(dims[1], y, at.y);
        PYDIST_ROLLED
        for (std::int32_t x = width.begin; x < width.end; ++x) {
          const std::int32_t k = tap_of(dims[2], x, at.x);
          if (i < 0 || j < 0 || k < 0) continue;
          const Position from{at.sample, at.channel, z, y, x};
          const std::int32_t tap = (i * dims[1].kernel + j) * dims[2].kernel + k;
          if (*element<const Tap>(taps, from) == tap) {
            sum += load_as(*element<const Storage>(out, from));
          }
        }
      }
    }
    *element<Storage>(in, at) = store_as<Storage>(sum);
  }

  PYDIST_HD void pick(const Position& at) const {
    const Tap taken = *element<const Tap>(taps, at);
    const bool any = taken != kNoTap<Tap>;
    const auto tap = static_cast<std::int32_t>(any ? taken : Tap{});
    const std::int32_t row = tap / dims[2].kernel;
    Position from = at;
    from.z = dims[0].first_of(at.z) + row / dims[1].kernel * dims[0].dilation;
    from.y = dims[1].first_of(at.y) + row % dims[1].kernel * dims[1].dilation;
    from.x = dims[2].first_of(at.x) + tap % dims[2].kernel * dims[2].dilation;
    const bool held = any && from.z >= 0 && from.z < dims[0].in_extent && from.y >= 0 &&
                      from.y < dims[1].in_extent && from.x >= 0 && from.x < dims[2].in_extent;
    if (held) {
      *element<Storage>(out, at) = *element<const Storage>(in, from);
    } else if (!accumulate) {
      *element<Storage>(out, at) = store_as<Storage>(T{});
    }
  }
};

}  // namespace pydist::ops
