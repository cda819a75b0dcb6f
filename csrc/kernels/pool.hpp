// Sums over pooling windows: what they are, in local indices, and the body for devices.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>

#include "core/view.hpp"
#include "kernels/conv_problem.hpp"
#include "kernels/half.hpp"
#include "launch/run_body.hpp"

namespace pydist::kernels {

// Which array is summed into: the outputs, or (the adjoint) the inputs' gradient.
enum class PoolOp { kForward, kBackward };

// Indices [begin, end) along one dim.
template <class Index>
struct BasicSpan {
  Index begin, end;

  PYDIST_HD Index size() const { return end - begin; }
};
using Span = BasicSpan<index_t>;

// One spatial dim: output o sums the inputs o * stride + k + base, 0 <= k < kernel. Inputs and
// outputs outside the given arrays take no part.
template <class Index>
struct BasicPoolDim {
  using Span = BasicSpan<Index>;
  Index base;  // out_lo * stride - padding - in_lo
  Index stride, kernel;
  Index in_extent, out_extent;
  const double* scale;  // [out_extent]

  PYDIST_HD Span inputs_of(Index o) const {
    const Index first = o * stride + base;
    return {clip(first, in_extent), clip(first + kernel, in_extent)};
  }
  PYDIST_HD Span outputs_of(Index i) const {
    return {clip(quotient(i - base - kernel) + 1, out_extent),
            clip(quotient(i - base) + 1, out_extent)};
  }

  template <PoolOp kOp>
  PYDIST_HD Index targets() const {
    return kOp == PoolOp::kForward ? out_extent : in_extent;
  }
  // The sources that target `index` sums.
  template <PoolOp kOp>
  PYDIST_HD Span sources_of(Index index) const {
    if constexpr (kOp == PoolOp::kForward) return inputs_of(index);
    if constexpr (kOp == PoolOp::kBackward) return outputs_of(index);
  }
  // From the first to the last target that sums any source.
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
  // The quotient by the stride, rounded down.
  PYDIST_HD Index quotient(Index position) const {
    return position / stride - (position % stride < 0 ? 1 : 0);
  }
  static PYDIST_HD Index clip(Index index, Index extent) {
    return index < 0 ? 0 : index > extent ? extent : index;
  }
};
using PoolDim = BasicPoolDim<index_t>;

// out[n, c, o] = scale(o) * sum_k in[n, c, o * stride + k + base], or its adjoint; scale(o) is the
// product of the three dims' scales. With `accumulate` the sums are added to the target, and what
// they do not reach is left alone; else all of the target is written.
struct PoolProblem {
  DType dtype;
  index_t batch, channels;
  PoolDim dims[kSpatialDims];
  ConvArray in, out;
  bool accumulate;

  template <PoolOp kOp>
  PYDIST_HD Span targets(int dim) const {
    return accumulate ? dims[dim].reached<kOp>() : Span{0, dims[dim].targets<kOp>()};
  }
};

// Attributes of a pooling and the global position of its two arrays.
struct PoolAttributes {
  Coords in_lo, out_lo;
  Coords kernel, stride, padding;
};

// The views must have passed the border's checks. Refuses positions whose indices overflow.
inline PoolProblem pool_problem(const TensorView& in, const TensorView& out,
                                const PoolAttributes& attributes,
                                const double* const (&scales)[kSpatialDims], bool accumulate) {
  PoolProblem problem{};
  problem.dtype = in.dtype;
  problem.batch = in.shape[0];
  problem.channels = in.shape[1];
  problem.accumulate = accumulate;
  for (int dim = 0; dim < kSpatialDims; ++dim) {
    const index_t stride = attributes.stride[dim], kernel = attributes.kernel[dim];
    const index_t base = checked_sub(
        checked_sub(checked_mul(attributes.out_lo[dim], stride), attributes.padding[dim]),
        attributes.in_lo[dim]);
    problem.dims[dim] = {base, stride, kernel, in.shape[2 + dim], out.shape[2 + dim], scales[dim]};
    checked_sub(checked_sub(0, base), kernel);
    checked_sub(in.shape[2 + dim], base);
    checked_add(checked_add(checked_mul(out.shape[2 + dim], stride), base), kernel);
  }
  problem.in = conv_array(in);
  problem.out = conv_array(out);
  return problem;
}

// target[n, c, t] (=|+=) sum over the sources of t, of PoolProblem, each target in one thread and a
// fixed order.
//
// Threads: a warp (or less) a run; lanes along the channels where they are adjacent in the target,
//   else along the width.
// Traffic: kernel volume / stride volume reads a source (caches hold most), one write a target.
// Proof: tests/native/test_kernels_pool.cpp emulates it against a plain loop, in three thread
//   orders; the CPU's loops (csrc/cpu/pool.cpp) are others, as they sum one dim after the other.
template <PoolOp kOp, class Storage>
struct PoolBody {
  using T = accumulator_t<Storage>;
  // 32 bits: they divide without a call, which would take registers.
  BasicPoolDim<std::int32_t> dims[kSpatialDims];
  std::int32_t first[2 + kSpatialDims], extent[2 + kSpatialDims];  // of the targets
  std::int32_t row_count;
  ConvArray source, target;
  bool accumulate;
  bool along_channels;  // the lanes; else along the width

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
    body.along_channels = body.target.strides[1] == 1 && problem.channels > 1;
    body.extent[0] = shorten(problem.batch);
    body.extent[1] = shorten(problem.channels);
    for (int dim = 0; dim < kSpatialDims; ++dim) {
      const PoolDim& along = problem.dims[dim];
      shorten(along.out_extent * along.stride + along.kernel + std::abs(along.base));
      shorten(along.in_extent + along.kernel + std::abs(along.base));
      body.dims[dim] = {shorten(along.base),      shorten(along.stride),     shorten(along.kernel),
                        shorten(along.in_extent), shorten(along.out_extent), along.scale};
      const Span targets = problem.targets<kOp>(dim);
      body.first[2 + dim] = shorten(targets.begin);
      body.extent[2 + dim] = shorten(targets.size());
    }
    index_t rows = body.run_length() == 0 ? 0 : 1;
    for (int dim = 0; dim < 2 + kSpatialDims; ++dim) {
      if (dim != body.lane_dim()) rows = checked_mul(rows, body.extent[dim]);
    }
    body.row_count = shorten(rows);
    return body;
  }

  PYDIST_HD int lane_dim() const { return along_channels ? 1 : 4; }
  PYDIST_HD index_t run_length() const { return extent[lane_dim()]; }
  PYDIST_HD index_t rows() const { return row_count; }

  PYDIST_HD Run row(index_t r) const {
    const int dim = along_channels ? 4 : 1;
    auto rest = static_cast<std::int32_t>(r);
    const std::int32_t last = first[dim] + rest % extent[dim];
    rest /= extent[dim];
    const std::int32_t y = first[3] + rest % extent[3];
    rest /= extent[3];
    const std::int32_t z = first[2] + rest % extent[2], sample = rest / extent[2];
    const std::int32_t channel = along_channels ? 0 : last;
    Run run{};
    run.width = along_channels ? last : first[4];
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
      const index_t channel = along_channels ? j : 0;
      const std::int32_t width = run.width + static_cast<std::int32_t>(j - channel);
      const T sum = sum_of(run, run.source + channel * source.strides[1], width);
      Storage& element = run.target[j * target.strides[lane_dim()]];
      element = store_as<Storage>(accumulate ? load_as(element) + sum : sum);
    });
  }

 private:
  static std::int32_t shorten(index_t value) {
    PYDIST_EXPECT(std::abs(value) <= std::numeric_limits<std::int32_t>::max(),
                  "a pooling with " + std::to_string(value) +
                      " rows or positions along a dim is too large for a device");
    return static_cast<std::int32_t>(value);
  }

  PYDIST_HD T sum_of(const Run& run, const Storage* data, std::int32_t x) const {
    const ShortSpan width = dims[2].template sources_of<kOp>(x);
    data += width.begin * source.strides[4];
    T sum{};
    PYDIST_ROLLED
    for (std::int32_t i = 0; i < run.depth.size(); ++i) {
      PYDIST_ROLLED
      for (std::int32_t j = 0; j < run.height.size(); ++j) {
        const Storage* const line = data + i * source.strides[2] + j * source.strides[3];
        T part{};
        PYDIST_ROLLED
        for (std::int32_t k = 0; k < width.size(); ++k) {
          T value = load_as(line[k * source.strides[4]]);
          if (kOp == PoolOp::kBackward) value *= static_cast<T>(dims[2].scale[width.begin + k]);
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

}  // namespace pydist::kernels
