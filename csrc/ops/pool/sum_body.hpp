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

// target[n, c, t] (=|+=) sum over the sources of t, each target in one thread and a fixed order.
//
// Index formula: forward, out[o] = scale(o) * sum_{i in inputs_of(o)} in[i]; backward, in[i] =
//   sum_{o in outputs_of(i)} scale(o) * out[o]: a gather both ways, without atomics.
// Threads: a warp (or less) per run; lanes as in PoolLanes.
// Traffic: each source is read kernel volume / stride volume times (mostly from caches), each
//   target written once.
// Proof: tests/native/test_pool_sum.cpp emulates it against a plain loop, in three thread orders.
// CPU code: another algorithm, dim by dim (cpu_sum.cpp).
template <PoolOp kOp, class Storage, Activation kActivation = Activation::kNone>
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
    Storage* target;          // of the first lane
    std::int32_t width;       // of the first target
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
    body.lanes = PoolLanes::make(problem.batch, problem.channels, targets, body.target);
    return body;
  }

  PYDIST_HD index_t run_length() const { return lanes.run_length(); }
  PYDIST_HD index_t rows() const { return lanes.row_count; }

  PYDIST_HD Run row(index_t r) const {
    const auto [sample, channel, z, y, x] = lanes.position(r);
    Run run{};
    run.width = x;
    run.depth = dims[0].template sources_of<kOp>(z);
    run.height = dims[1].template sources_of<kOp>(y);
    run.source = static_cast<const Storage*>(source.data) + sample * source.strides[0] +
                 channel * source.strides[1] + run.depth.begin * source.strides[2] +
                 run.height.begin * source.strides[3];
    run.target = static_cast<Storage*>(target.data) + sample * target.strides[0] +
                 channel * target.strides[1] + z * target.strides[2] + y * target.strides[3] +
                 run.width * target.strides[4];
    if constexpr (kOp == PoolOp::kForward) {
      run.scale = static_cast<T>(dims[0].scale[z] * dims[1].scale[y]);
    }
    return run;
  }

  template <class Loop>
  PYDIST_HD void each(const Run& run, const Loop& loop) const {
    loop(run_length(), [this, run](index_t j) {
      const index_t channel = lanes.along_channels ? j : 0;
      const std::int32_t width = run.width + static_cast<std::int32_t>(j - channel);
      T sum = sum_of(run, run.source + channel * source.strides[1], width);
      Storage& element = run.target[j * target.strides[lanes.lane_dim()]];
      if constexpr (kGates) {
        const index_t at = &element - static_cast<const Storage*>(target.data);
        const T sign = load_as(static_cast<const Storage*>(gate)[at]);
        sum = activation_gradient<kActivation>(sign, sum, slope);
      }
      element = store_as<Storage>(accumulate ? load_as(element) + sum : sum);
    });
  }

 private:
  PYDIST_HD T sum_of(const Run& run, const Storage* data, std::int32_t x) const {
    const ShortSpan width = dims[2].template sources_of<kOp>(x);
    const double* const scales = dims[2].scale + width.begin;
    const Storage* plane = data + width.begin * source.strides[4];
    T sum{};
    // Addresses advance by strides: a product of 64 bits costs more than the rest of a tap.
    PYDIST_ROLLED
    for (std::int32_t i = 0; i < run.depth.size(); ++i, plane += source.strides[2]) {
      const Storage* line = plane;
      PYDIST_ROLLED
      for (std::int32_t j = 0; j < run.height.size(); ++j, line += source.strides[3]) {
        const Storage* at = line;
        T part{};
        PYDIST_ROLLED
        for (std::int32_t k = 0; k < width.size(); ++k, at += source.strides[4]) {
          T value = load_as(*at);
          if (kOp == PoolOp::kForward) value = activated<kActivation>(value, slope);
          if (kOp == PoolOp::kBackward) value *= static_cast<T>(scales[k]);
          part += value;
        }
        if (kOp == PoolOp::kBackward) {
          part *= static_cast<T>(dims[0].scale[run.depth.begin + i] *
                                 dims[1].scale[run.height.begin + j]);
        }
        sum += part;
      }
    }
    if (kOp == PoolOp::kForward) sum *= run.scale * static_cast<T>(dims[2].scale[x]);
    return sum;
  }
};

}  // namespace pydist::ops
