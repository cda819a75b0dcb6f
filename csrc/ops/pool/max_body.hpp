// Maxima over pooling windows and their taps: the definition, and the bodies for devices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/view.hpp"
#include "launch/run_body.hpp"
#include "ops/common/half.hpp"
#include "ops/common/vector.hpp"
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

  // Whether all arrays can be accessed as vectors of adjacent channels.
  bool has_vectors(int elements, index_t size, index_t tap_size) const {
    VectorFit fit{elements};
    fit_channels(fit, in, size,
                 {batch, channels, dims[0].in_extent, dims[1].in_extent, dims[2].in_extent});
    const index_t outputs[] = {batch, channels, dims[0].out_extent, dims[1].out_extent,
                               dims[2].out_extent};
    fit_channels(fit, out, size, outputs);
    fit_channels(fit, taps, tap_size, outputs);
    return fit.fits;
  }
  // Whether no input is in two windows: MaxScatterBody.
  bool has_disjoint_windows() const {
    return std::all_of(dims, dims + kSpatialDims, [](const PoolDim& dim) {
      return !dim.is_adaptive() && dim.dilation == 1 && dim.kernel <= dim.stride;
    });
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

// The element of an array at a position; `Element` is const for a source.
template <class Element>
PYDIST_HD Element* element_at(const SpatialArray& array, const PoolLanes::Position& at) {
  return static_cast<Element*>(array.data) + at.sample * array.strides[0] +
         at.channel * array.strides[1] + at.z * array.strides[2] + at.y * array.strides[3] +
         at.x * array.strides[4];
}

// A vector of targets of MaxProblem per lane, each in a fixed order.
//
// Index formula: forward, of MaxProblem. Backward, in[i] = sum of out[o] over the outputs o whose
//   window contains i and whose tap is i: a gather, without atomics. Pick, out[o] =
//   in[tap of o].
// Threads: rows and lanes as in PoolLanes, N adjacent channels per lane (1 for pick). What depends
//   on depth and height only is computed once per row.
// Traffic: forward reads each source kernel volume / stride volume times (mostly from caches),
//   backward as often a gradient and its tap; each target is written once.
// Proof: tests/native/test_pool_max.cpp emulates it against a plain loop, in three thread orders.
// CPU code: this body for pick; forward goes tap by tap over whole lines (cpu_max.cpp), backward
//   scatters (cpu_max_spread.hpp).
template <MaxOp kOp, class Storage, class Tap, int N>
struct MaxBody {
  // Maxima, taps and values that are read ahead need registers, and so do loops over two arrays.
  static constexpr int kRunBlocks = N > 1 || kOp == MaxOp::kBackward ? 3 : 4;
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
    body.lanes = PoolLanes::make(problem.batch, problem.channels, targets, target, N);
    return body;
  }

  PYDIST_HD index_t run_length() const { return lanes.run_length(); }
  PYDIST_HD index_t rows() const { return lanes.row_count; }
  PYDIST_HD Position row(index_t r) const { return lanes.position(r); }

  template <class Loop>
  PYDIST_HD void each(const Position& run, const Loop& loop) const {
    if constexpr (kOp == MaxOp::kForward) forward(run, loop);
    if constexpr (kOp == MaxOp::kBackward) backward(run, loop);
    if constexpr (kOp == MaxOp::kPick) {
      loop(run_length(), [this, run](index_t j) {
        const auto [x, channel] = lanes.piece(j);
        pick({run.sample, run.channel + channel, run.z, run.y, x});
      });
    }
  }

 private:
  using Taps = TapSpan<std::int32_t>;
  using Values = Vector<Storage, N>;
  using Numbers = Vector<Tap, N>;

  // The maxima so far of taps that are visited in ascending order: the first of equal ones stays,
  // and a NaN gives way only to a later NaN.
  struct Best {
    T value[N];
    std::int32_t tap[N];

    PYDIST_HD void take(const Values& values, std::int32_t number) {
      PYDIST_UNROLLED
      for (int e = 0; e < N; ++e) {
        const T other = load_as(values.element[e]);
        const bool taken = other > value[e] || other != other;
        value[e] = taken ? other : value[e];
        tap[e] = taken ? number : tap[e];
      }
    }
  };

  PYDIST_HD std::int32_t number_of(std::int32_t i, std::int32_t j, std::int32_t k) const {
    return (i * dims[1].kernel + j) * dims[2].kernel + k;
  }

  template <class Loop>
  PYDIST_HD void forward(const Position& run, const Loop& loop) const {
    const Taps depth = dims[0].taps_of(run.z), height = dims[1].taps_of(run.y);
    const Storage* const source = element_at<const Storage>(
        in, {run.sample, run.channel, first_input(depth, 0), first_input(height, 1), 0});
    const Position line{run.sample, run.channel, run.z, run.y, 0};
    Storage* const values = element_at<Storage>(out, line);
    Tap* const numbers = element_at<Tap>(taps, line);
    loop(run_length(), [=, this](index_t j) {
      const auto [x, channel] = lanes.piece(j);
      const Best best = best_of(source + channel * in.strides[1], depth, height, x);
      merge(best, values + channel * out.strides[1] + x * out.strides[4],
            numbers + channel * taps.strides[1] + x * taps.strides[4]);
    });
  }

  PYDIST_HD std::int32_t first_input(const Taps& along, int dim) const {
    return along.first + along.begin * dims[dim].dilation;
  }

  // `plane`: the first input along depth and height, at the width's index 0.
  PYDIST_HD Best best_of(const Storage* plane, const Taps& depth, const Taps& height,
                         std::int32_t x) const {
    const Taps width = dims[2].taps_of(x);
    const auto step = [this](int dim) { return dims[dim].dilation * in.strides[2 + dim]; };
    const bool any =
        depth.begin < depth.end && height.begin < height.end && width.begin < width.end;
    Best best;
    PYDIST_UNROLLED
    for (int e = 0; e < N; ++e) {
      best.value[e] = -std::numeric_limits<T>::infinity();
      best.tap[e] = any ? number_of(depth.begin, height.begin, width.begin)
                        : static_cast<std::int32_t>(kNoTap<Tap>);
    }
    plane += first_input(width, 2) * in.strides[4];
    PYDIST_ROLLED
    for (std::int32_t i = depth.begin; i < depth.end; ++i, plane += step(0)) {
      const Storage* line = plane;
      PYDIST_ROLLED
      for (std::int32_t j = height.begin; j < height.end; ++j, line += step(1)) {
        const Storage* from = line;
        std::int32_t k = width.begin, number = number_of(i, j, k);
        PYDIST_ROLLED
        for (; k + 1 < width.end; k += 2, number += 2) {  // two loads are in flight
          const Values one = Values::load(from), two = Values::load(from + step(2));
          best.take(one, number);
          best.take(two, number + 1);
          from += 2 * step(2);
        }
        if (k < width.end) best.take(Values::load(from), number);
      }
    }
    return best;
  }

  PYDIST_HD void merge(const Best& best, Storage* to, Tap* to_numbers) const {
    Values values{};
    Numbers numbers{};
    if (accumulate) {
      values = Values::load(to);
      numbers = Numbers::load(to_numbers);
    }
    PYDIST_UNROLLED
    for (int e = 0; e < N; ++e) {
      const Maximum<T, Tap> found{best.value[e], static_cast<Tap>(best.tap[e])};
      const Maximum<T, Tap> before{load_as(values.element[e]), numbers.element[e]};
      if (accumulate && !before.yields_to(found)) continue;
      values.element[e] = store_as<Storage>(found.value);
      numbers.element[e] = found.tap;
    }
    values.store(to);
    numbers.store(to_numbers);
  }

  // The number of the tap along a dim through which output o reads input i, or -1.
  static PYDIST_HD std::int32_t tap_of(const BasicPoolDim<std::int32_t>& dim, std::int32_t o,
                                       std::int32_t i) {
    const std::int32_t distance = i - dim.first_of(o);
    if (dim.dilation == 1) return distance;
    return distance % dim.dilation == 0 ? distance / dim.dilation : -1;
  }

  template <class Loop>
  PYDIST_HD void backward(const Position& run, const Loop& loop) const {
    const auto depth = dims[0].outputs_of(run.z), height = dims[1].outputs_of(run.y);
    const Position first{run.sample, run.channel, depth.begin, height.begin, 0};
    const Storage* const grads = element_at<const Storage>(out, first);
    const Tap* const numbers = element_at<const Tap>(taps, first);
    Storage* const target = element_at<Storage>(in, {run.sample, run.channel, run.z, run.y, 0});
    loop(run_length(), [=, this](index_t at) {
      const auto [x, channel] = lanes.piece(at);
      const auto width = dims[2].outputs_of(x);
      const Storage* plane = grads + channel * out.strides[1] + width.begin * out.strides[4];
      const Tap* tap_plane = numbers + channel * taps.strides[1] + width.begin * taps.strides[4];
      T sum[N]{};
      PYDIST_ROLLED
      for (std::int32_t z = depth.begin; z < depth.end; ++z) {
        const std::int32_t i = tap_of(dims[0], z, run.z);
        const Storage* line = plane;
        const Tap* tap_line = tap_plane;
        PYDIST_ROLLED
        for (std::int32_t y = height.begin; y < height.end; ++y) {
          const std::int32_t j = tap_of(dims[1], y, run.y);
          const Storage* from = line;
          const Tap* tap_from = tap_line;
          PYDIST_ROLLED
          for (std::int32_t o = width.begin; o < width.end; ++o) {
            const std::int32_t k = tap_of(dims[2], o, x);
            if (i >= 0 && j >= 0 && k >= 0) add_taken(from, tap_from, number_of(i, j, k), sum);
            from += out.strides[4];
            tap_from += taps.strides[4];
          }
          line += out.strides[3];
          tap_line += taps.strides[3];
        }
        plane += out.strides[2];
        tap_plane += taps.strides[2];
      }
      Values values;
      PYDIST_UNROLLED
      for (int e = 0; e < N; ++e) values.element[e] = store_as<Storage>(sum[e]);
      values.store(target + channel * in.strides[1] + x * in.strides[4]);
    });
  }

  static PYDIST_HD void add_taken(const Storage* from, const Tap* tap_from, std::int32_t number,
                                  T (&sum)[N]) {
    const Values grads = Values::load(from);
    const Numbers numbers = Numbers::load(tap_from);
    PYDIST_UNROLLED
    for (int e = 0; e < N; ++e) {
      if (numbers.element[e] == number) sum[e] += load_as(grads.element[e]);
    }
  }

  PYDIST_HD void pick(const Position& at) const {
    const Tap taken = *element_at<const Tap>(taps, at);
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
      *element_at<Storage>(out, at) = *element_at<const Storage>(in, from);
    } else if (!accumulate) {
      *element_at<Storage>(out, at) = store_as<Storage>(T{});
    }
  }
};

}  // namespace pydist::ops
