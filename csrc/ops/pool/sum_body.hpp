// Sums over pooling windows: the definition, in local indices, and the body for devices.
//
// Average pooling over a cut sample: each rank sums its own shard, then adds the contributions of
// other ranks' slabs to the outputs at the cut (`accumulate`). The scales are those of full
// windows.
#pragma once

#include <cstdint>

#include "core/view.hpp"
#include "launch/run_body.hpp"
#include "ops/common/activation.hpp"
#include "ops/common/half.hpp"
#include "ops/common/vector.hpp"
#include "ops/pool/windows.hpp"

namespace pydist::ops {

// out[n, c, o] = scale(o) * sum of in[n, c, i] over the inputs i of window o, or its adjoint;
// scale(o) is the product of the three dims' scales. With `accumulate` the sums are added to the
// target, and the rest of it is unchanged; else the full target is written.
// A ReLU before the pooling, leaky or not, is fused: forward applies it to `in` while reading;
// backward multiplies the sums by its derivative at `gate`, where only the sign of `gate` matters.
struct PoolProblem {
  DType dtype;
  index_t batch, channels;
  PoolDim dims[kSpatialDims];
  SpatialArray in, out;
  bool accumulate;
  double slope = 1;            // of the ReLU, see activation_of; 1: none
  const void* gate = nullptr;  // of the adjoint, of the strides of `in`

  template <PoolOp kOp>
  PYDIST_HD Span targets(int dim) const {
    return accumulate ? dims[dim].reached<kOp>() : Span{0, dims[dim].targets<kOp>()};
  }

  // Whether all arrays can be accessed as vectors of adjacent channels.
  bool has_vectors(int elements, index_t size) const {
    VectorFit fit{elements};
    fit_channels(fit, in, size,
                 {batch, channels, dims[0].in_extent, dims[1].in_extent, dims[2].in_extent});
    fit_channels(fit, out, size,
                 {batch, channels, dims[0].out_extent, dims[1].out_extent, dims[2].out_extent});
    return fit.address(gate, size).fits;
  }
};

// The views must have passed the border's checks, and the footprints have no dilation.
inline PoolProblem pool_problem(const TensorView& in, const TensorView& out,
                                const PoolAttributes& attributes,
                                const double* const (&scales)[kSpatialDims], bool accumulate) {
  PoolProblem problem{};
  problem.dtype = in.dtype;
  problem.batch = in.shape[0];
  problem.channels = in.shape[1];
  problem.accumulate = accumulate;
  for (int dim = 0; dim < kSpatialDims; ++dim) {
    problem.dims[dim] = pool_dim(attributes, dim, in.shape[2 + dim], out.shape[2 + dim]);
    problem.dims[dim].scale = scales[dim];
  }
  problem.in = spatial_array(in);
  problem.out = spatial_array(out);
  return problem;
}

// target[n, c, t] (=|+=) sum over the sources of t, each target in one lane and a fixed order.
//
// Index formula: forward, out[o] = scale(o) * sum_{i in inputs_of(o)} in[i]; backward, in[i] =
//   sum_{o in outputs_of(i)} scale(o) * out[o]: a gather both ways, without atomics.
// Threads: a warp (or less) per run; lanes as in PoolLanes, N adjacent channels per lane.
// Traffic: each source is read kernel volume / stride volume times (mostly from caches), each
//   target written once.
// Proof: tests/native/test_pool_sum.cpp emulates it against a plain loop, in three thread orders.
// CPU code: another algorithm, dim by dim (cpu_sum.cpp).
template <PoolOp kOp, class Storage, int N, Activation kActivation = Activation::kNone>
struct PoolBody {
  using T = accumulator_t<Storage>;
  static constexpr bool kGates = kOp == PoolOp::kBackward && kActivation != Activation::kNone;
  BasicPoolDim<std::int32_t> dims[kSpatialDims];
  PoolLanes lanes;
  SpatialArray source, target;
  bool accumulate;
  T slope;
  const void* gate;

  using ShortSpan = BasicSpan<std::int32_t>;
  struct Run {
    const Storage* source;    // the first one along depth and height, at the width's index 0
    index_t target;           // offset of the first channel, at the width's index 0
    ShortSpan depth, height;  // of the sources
    T scale;                  // forward, of the targets along depth and height
  };

  static PoolBody make(const PoolProblem& problem) {
    PoolBody body{};
    body.source = kOp == PoolOp::kForward ? problem.in : problem.out;
    body.target = kOp == PoolOp::kForward ? problem.out : problem.in;
    body.accumulate = problem.accumulate;
    body.slope = static_cast<T>(problem.slope);
    body.gate = problem.gate;
    Span targets[kSpatialDims];
    for (int dim = 0; dim < kSpatialDims; ++dim) {
      body.dims[dim] = shorten(problem.dims[dim]);
      targets[dim] = problem.targets<kOp>(dim);
    }
    body.lanes = PoolLanes::make(problem.batch, problem.channels, targets, body.target, N);
    return body;
  }

  PYDIST_HD index_t run_length() const { return lanes.run_length(); }
  PYDIST_HD index_t rows() const { return lanes.row_count; }

  PYDIST_HD Run row(index_t r) const {
    const auto [sample, channel, z, y, x] = lanes.position(r);
    Run run{};
    run.depth = dims[0].template sources_of<kOp>(z);
    run.height = dims[1].template sources_of<kOp>(y);
    run.source = static_cast<const Storage*>(source.data) + sample * source.strides[0] +
                 channel * source.strides[1] + run.depth.begin * source.strides[2] +
                 run.height.begin * source.strides[3];
    run.target = sample * target.strides[0] + channel * target.strides[1] + z * target.strides[2] +
                 y * target.strides[3];
    if constexpr (kOp == PoolOp::kForward) {
      run.scale = static_cast<T>(dims[0].scale[z] * dims[1].scale[y]);
    }
    return run;
  }

  template <class Loop>
  PYDIST_HD void each(const Run& run, const Loop& loop) const {
    loop(run_length(), [this, run](index_t j) {
      const auto [x, channel] = lanes.piece(j);
      Sums sums = sums_of(run, run.source + channel * source.strides[1], x);
      const index_t at = run.target + channel * target.strides[1] + x * target.strides[4];
      if constexpr (kGates) {
        const Values signs = Values::load(static_cast<const Storage*>(gate) + at);
        PYDIST_UNROLLED
        for (int e = 0; e < N; ++e) {
          sums.of[e] =
              activation_gradient<kActivation>(load_as(signs.element[e]), sums.of[e], slope);
        }
      }
      Storage* const to = static_cast<Storage*>(target.data) + at;
      Values values{};
      if (accumulate) values = Values::load(to);
      PYDIST_UNROLLED
      for (int e = 0; e < N; ++e) {
        values.element[e] =
            store_as<Storage>(accumulate ? load_as(values.element[e]) + sums.of[e] : sums.of[e]);
      }
      values.store(to);
    });
  }

 private:
  using Values = Vector<Storage, N>;

  struct Sums {
    T of[N];

    PYDIST_HD void add(const Values& values, const PoolBody& body, [[maybe_unused]] T scale) {
      PYDIST_UNROLLED
      for (int e = 0; e < N; ++e) {
        T value = load_as(values.element[e]);
        if (kOp == PoolOp::kForward) value = activated<kActivation>(value, body.slope);
        if (kOp == PoolOp::kBackward) value *= scale;
        of[e] += value;
      }
    }
  };

  PYDIST_HD Sums sums_of(const Run& run, const Storage* data, std::int32_t x) const {
    const ShortSpan width = dims[2].template sources_of<kOp>(x);
    const double* const scales = dims[2].scale + width.begin;
    const Storage* plane = data + width.begin * source.strides[4];
    const auto scale = [&](std::int32_t k) {
      return kOp == PoolOp::kBackward ? static_cast<T>(scales[k]) : T{1};
    };
    Sums sums{};
    // Addresses advance by strides: a product of 64 bits costs more than the rest of a tap.
    PYDIST_ROLLED
    for (std::int32_t i = 0; i < run.depth.size(); ++i, plane += source.strides[2]) {
      const Storage* line = plane;
      PYDIST_ROLLED
      for (std::int32_t j = 0; j < run.height.size(); ++j, line += source.strides[3]) {
        const Storage* at = line;
        Sums part{};
        std::int32_t k = 0;
        PYDIST_ROLLED
        for (; k + 1 < width.size(); k += 2) {  // two loads are in flight
          const Values one = Values::load(at), two = Values::load(at + source.strides[4]);
          part.add(one, *this, scale(k));
          part.add(two, *this, scale(k + 1));
          at += 2 * source.strides[4];
        }
        if (k < width.size()) part.add(Values::load(at), *this, scale(k));
        T factor{1};
        if (kOp == PoolOp::kBackward) {
          factor = static_cast<T>(dims[0].scale[run.depth.begin + i] *
                                  dims[1].scale[run.height.begin + j]);
        }
        PYDIST_UNROLLED
        for (int e = 0; e < N; ++e) {
          if (kOp == PoolOp::kBackward) part.of[e] *= factor;
          sums.of[e] += part.of[e];
        }
      }
    }
    if (kOp == PoolOp::kForward) {
      const T factor = run.scale * static_cast<T>(dims[2].scale[x]);
      PYDIST_UNROLLED
      for (int e = 0; e < N; ++e) sums.of[e] *= factor;
    }
    return sums;
  }
};

// Calls f(body) with the body for a problem. Storage and kActivation are the problem's.
template <PoolOp kOp, class Storage, Activation kActivation, class F>
void with_pool_body(const PoolProblem& problem, const F& f) {
  constexpr int kWide = kVectorElements<Storage>;
  if (problem.has_vectors(kWide, sizeof(Storage))) {
    f(PoolBody<kOp, Storage, kWide, kActivation>::make(problem));
  } else {
    f(PoolBody<kOp, Storage, 1, kActivation>::make(problem));
  }
}

}  // namespace pydist::ops
