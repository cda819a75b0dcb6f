// The two steps of the CPU's sums over pooling windows (cpu_sum.cpp): gather, from rows of sources
// to lines of sums along the width, and scatter, from lines of sums to targets.
//
// gather(sum, to):   buffer line = sum over rows of source lines         (loop of isa_sum.cpp)
//                    to line     = sums of the buffer line along the width
// scatter(sum, z):   target line = sum over lines of sums               (loop of isa_sum.cpp)
//
// `sum` has the rows and their factors: of the height or the depth, depending on the direction.
//
// Index formula: forward sums along the height, the width and the depth in turn, backward along the
//   depth, the width and the height. Each dim is summed by itself, so a target costs the sum, not
//   the product, of the three kernel extents.
// Threads: a task (cpu_sum.cpp) has its own targets and buffers; no sum is shared.
// Traffic: sources are read once per target line that sums them, from the caches except for the
//   first time; buffer and sums stay in L1 and L2; each target is written once.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "isa/isa.hpp"
#include "ops/common/half.hpp"
#include "ops/pool/cpu_sum_plan.hpp"
#include "ops/pool/isa_tables.hpp"

namespace pydist::cpu {

template <class Storage>
const auto& pool_line_isa() {
  const PoolSumTable& table = isa::chosen(PYDIST_ISA_TABLES(kPoolSum));
  if constexpr (std::is_same_v<Storage, ops::Float16>) return table.lines_f16;
  if constexpr (std::is_same_v<Storage, ops::BFloat16>) return table.lines_bf16;
  if constexpr (std::is_same_v<Storage, float>) return table.lines_f32;
  if constexpr (std::is_same_v<Storage, double>) return table.lines_f64;
}

template <class T>
const PoolWidthIsa<T>& pool_width_isa() {
  const PoolSumTable& table = isa::chosen(PYDIST_ISA_TABLES(kPoolSum));
  if constexpr (std::is_same_v<T, float>) {
    return table.width_f32;
  } else {
    return table.width_f64;
  }
}

// `Storage` is the arrays' type, `T` the type of computations.
template <class Storage, ops::PoolOp kOp>
class PoolPasses {
 protected:
  using T = ops::accumulator_t<Storage>;
  static constexpr bool kForward = kOp == ops::PoolOp::kForward;

  explicit PoolPasses(const ops::PoolProblem& problem)
      : problem_(problem),
        source_(kForward ? problem.in : problem.out),
        target_(kForward ? problem.out : problem.in),
        channels_adjacent_(problem.channels > 1 && target_.strides[1] == 1),
        depth_(problem.targets<kOp>(0)),
        height_(problem.targets<kOp>(1)),
        width_(problem.dims[2], problem.targets<kOp>(2), channels_adjacent_ ? problem.channels : 1),
        depth_spans_(spans_of<kOp>(problem.dims[0], depth_)),
        height_spans_(spans_of<kOp>(problem.dims[1], height_)),
        isa_(pool_line_isa<Storage>()),
        width_isa_(pool_width_isa<T>()),
        activation_(static_cast<int>(ops::activation_of(problem.slope))) {
    for (int dim = 0; dim < ops::kSpatialDims; ++dim) {
      const ops::PoolDim& along = problem.dims[dim];
      factors_[dim].assign(along.scale, along.scale + along.out_extent);
    }
    scaled_ =
        std::any_of(factors_[2].begin(), factors_[2].end(), [](T factor) { return factor != 1; });
  }

  // The arrays of a task, and its memory.
  struct Task {
    index_t channels;
    const Storage* source;    // at its sample, channels and first position of the width
    Storage* target;          // at its sample, channels and first target of the call
    ops::Span depth, height;  // its targets, from the first target of the call
    index_t lines;            // of a plane of sums: of targets forward, of sources backward
    T *buffer, *even, *odd;
    T* sums;  // [forward: planes][lines][line_pitch][channels], summed along the width
  };

  index_t line_pitch(const Task& task) const { return width_.line_pitch * task.channels; }

  // to[line][x][c] = the sum of source rows (`sum`), summed along the width. Processes the lines in
  // pieces of lines_, so that the buffer stays in the L1 cache.
  void gather(const Task& task, PoolLines<Storage, T, T> sum, T* to) const {
    const index_t pitch = width_.pitch * task.channels, count = width_.sources.size();
    sum.to = task.buffer + (width_.sources.begin - width_.origin) * task.channels;
    sum.target = pitch;
    sum.runs = {count, task.channels, source_.strides[4], task.channels};
    sum.slope = static_cast<T>(problem_.slope);
    for (index_t y = 0; y < task.lines; y += lines_) {
      sum.targets = std::min(lines_, task.lines - y);
      if (task.channels == 1 || source_.strides[1] == 1) {
        isa_.gather[kForward ? activation_ : 0](sum);
      } else {
        gather_strided(sum);
      }
      for (index_t line = 0; !kForward && scaled_ && line < sum.targets; ++line) {
        width_isa_.scale(sum.to + line * pitch, factors_[2].data() + width_.sources.begin, count,
                         task.channels);
      }
      sum_width(task, sum.targets, to + y * line_pitch(task));
      sum.from += sum.targets * sum.line;
      sum.spans += sum.targets * sum.span_step;
      sum.factors += sum.targets * sum.target_factor;
    }
  }

  // gather with transposition, for sources without and targets with adjacent channels; along the
  // shorter stride of the source first.
  void gather_strided(const PoolLines<Storage, T, T>& sum) const {
    const index_t count = sum.runs.count, channels = sum.runs.length;
    const index_t along = source_.strides[4], across = source_.strides[1];
    for (index_t y = 0; y < sum.targets; ++y) {
      T* const to = sum.to + y * sum.target;
      std::fill_n(to, count * channels, T{});
      const PoolSpan span = sum.spans[y * sum.span_step];
      for (index_t i = span.begin; i < span.end; ++i) {
        const Storage* const row = sum.from + y * sum.line + i * sum.row;
        const T factor = sum.factors[y * sum.target_factor + i * sum.row_factor];
        const auto add = [&](index_t x, index_t c) {
          to[x * channels + c] += factor * value_of(row[x * along + c * across]);
        };
        if (std::abs(along) < std::abs(across)) {
          for (index_t c = 0; c < channels; ++c) {
            for (index_t x = 0; x < count; ++x) add(x, c);
          }
        } else {
          for (index_t x = 0; x < count; ++x) {
            for (index_t c = 0; c < channels; ++c) add(x, c);
          }
        }
      }
    }
  }

  // A source after the ReLU of forward.
  T value_of(Storage source) const {
    const T value = ops::load_as(source), slope = static_cast<T>(problem_.slope);
    if (!kForward || activation_ == 0) return value;
    if (slope == 0) return ops::activated<ops::Activation::kRelu>(value, slope);
    return ops::activated<ops::Activation::kLeakyRelu>(value, slope);
  }

  // Sums of the buffer's lines along the width, as chosen by the plan (WidthPlan).
  void sum_width(const Task& task, index_t lines, T* to) const {
    const ops::PoolDim& dim = problem_.dims[2];
    const index_t channels = task.channels, count = width_.targets.size();
    const index_t positions = lines * width_.pitch;
    const index_t even_taps = ceil_div(dim.kernel, 2), odd_taps = dim.kernel / 2;
    if (!width_.padded) {
      for (index_t line = 0; line < lines; ++line) {
        width_isa_.spans(task.buffer + line * width_.pitch * channels, width_.spans.data(), count,
                         channels, to + line * line_pitch(task));
      }
    } else if (dim.stride == 1) {
      width_isa_.windows(task.buffer, dim.kernel, nullptr, 0, positions, to);
    } else if (kForward) {
      width_isa_.split(task.buffer, positions / 2, task.even, task.odd);
      width_isa_.windows(task.even, even_taps, task.odd, odd_taps, positions / 2, to);
    } else {
      width_isa_.windows(task.buffer, even_taps, nullptr, 0, positions, task.even);
      width_isa_.windows(task.buffer + even_taps - odd_taps, odd_taps, nullptr, 0, positions,
                         task.odd);
      width_isa_.merge(task.even, task.odd, positions, to);
    }
    for (index_t line = 0; kForward && scaled_ && line < lines; ++line) {
      width_isa_.scale(to + line * line_pitch(task), factors_[2].data() + width_.targets.begin,
                       count, channels);
    }
  }

  // The targets of plane z of a task, from rows of sums (`sum`).
  void scatter(const Task& task, PoolLines<T, Storage, T> sum, index_t z) const {
    sum.from += width_.first * task.channels;
    sum.to = task.target + z * target_.strides[2] + task.height.begin * target_.strides[3];
    sum.targets = task.height.size();
    sum.target = target_.strides[3];
    sum.runs = {width_.targets.size(), task.channels, task.channels, target_.strides[4]};
    sum.accumulate = problem_.accumulate;
    sum.stream = stream_;
    sum.slope = static_cast<T>(problem_.slope);
    if (!kForward && activation_ != 0) sum.gate = gate_of(sum.to);
    isa_.scatter[kForward ? 0 : activation_](sum);
  }

  // The gate of a target: at the same offset, as gate and target have equal strides.
  const Storage* gate_of(const Storage* target) const {
    return static_cast<const Storage*>(problem_.gate) +
           (target - static_cast<const Storage*>(target_.data));
  }

  const ops::PoolProblem& problem_;
  const ops::SpatialArray& source_;
  const ops::SpatialArray& target_;
  const bool channels_adjacent_;    // channels are adjacent in the targets: lines hold many of them
  const ops::Span depth_, height_;  // of targets
  const WidthPlan<kOp> width_;
  const std::vector<PoolSpan> depth_spans_, height_spans_;
  const PoolLineIsa<Storage, T>& isa_;
  const PoolWidthIsa<T>& width_isa_;
  std::vector<T> factors_[ops::kSpatialDims];  // the outputs' scales
  bool scaled_;                                // the width's scales are not all 1
  index_t lines_ = 1;                          // of a buffer, at most
  bool stream_ = false;
  const int activation_;  // 0 for none, as of PoolLineIsa
};

}  // namespace pydist::cpu
