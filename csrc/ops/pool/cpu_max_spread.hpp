// The adjoint of maxima over pooling windows on the CPU: adds each output's gradient to the input
// of its tap.
//
// This is a scatter; the shared body gathers. The body visits for each input all windows that
// contain it; here each output is visited once (cpu_max.cpp has the measured ratio).
//
// Index formula: in[tap of o] += out[o] for all outputs o whose tap is in the array of inputs.
// Threads: a task has planes of inputs of some channels, and visits all outputs that reach them.
// Traffic: each gradient and tap is read once, twice where its window reaches the planes of two
//   tasks; each input is zeroed, added to in the caches, and written once.
// Proof: tests/native/test_pool_max.cpp against plain loops.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "launch/cpu.hpp"
#include "launch/scratch.hpp"
#include "launch/thread_pool.hpp"
#include "ops/pool/max_body.hpp"

namespace pydist::cpu {

// One call. Tasks are planes of inputs, for one channel or, if channels are adjacent, for a block
// of channels: no two tasks write one input. Outputs whose windows reach a task's planes are
// visited in C order, so every input's sum has one order, whatever the tasks. Sums of half types
// are formed in a float array of the task, then rounded once.
template <class Storage, class Tap>
class MaxSpreader {
  using T = ops::accumulator_t<Storage>;
  using SpatialArray = ops::SpatialArray;
  static constexpr index_t kChannels = 32;      // of a task
  static constexpr index_t kSums = 512 * 1024;  // elements of separate sums: they fit the L2 cache
  static constexpr index_t kTapOffsets = 64 * 1024;  // taps in a look-up table, at most
  static constexpr index_t kMinPlanes = 4;           // windows at their border are visited twice

 public:
  // Keeps a reference to the problem, which must outlive it.
  explicit MaxSpreader(const ops::MaxProblem& problem)
      : problem_(problem),
        in_(problem.in),
        dims_(problem.dims),
        channels_adjacent_(in_.strides[1] == 1 && problem.channels > 1),
        channel_step_(channels_adjacent_ ? std::min(problem.channels, kChannels) : 1) {
    volume_ = 1;
    for (const ops::PoolDim& dim : dims_) {
      volume_ *= dim.kernel;
      overlaps_ |= dim.is_adaptive() || dim.stride < (dim.kernel - 1) * dim.dilation + 1;
    }
    apart_ = overlaps_ && !std::is_same_v<Storage, T>;
    if (apart_) {
      step_x_ = channel_step_;
      step_y_ = dims_[2].in_extent * step_x_;
      step_z_ = dims_[1].in_extent * step_y_;
    } else {
      step_x_ = in_.strides[4];
      step_y_ = in_.strides[3];
      step_z_ = in_.strides[2];
    }
    for (index_t tap = 0; tap < volume_ && volume_ <= kTapOffsets; ++tap)
      tap_offsets_.push_back(tap_offset(tap));
  }

  // Writes the full array of inputs' gradients, on the pool's threads, and returns when it is done.
  void run() const {
    const index_t depth = dims_[0].in_extent;
    const index_t plane = dims_[1].in_extent * dims_[2].in_extent;
    const index_t elements = problem_.batch * problem_.channels * depth * plane;
    if (elements == 0) return;
    const index_t channel_steps = ceil_div(problem_.channels, channel_step_);
    const index_t outer = problem_.batch * channel_steps;
    const index_t parts =
        apart_ ? ceil_div(depth, std::max<index_t>(kSums / (plane * channel_step_), 1))
               : std::clamp<index_t>(4 * launch::num_threads() / outer, 1,
                                     ceil_div(depth, kMinPlanes));
    const index_t tasks = outer * parts;
    const index_t bytes = elements * static_cast<index_t>(sizeof(Storage));
    launch::parallel_for(tasks, std::max<index_t>(tasks * launch::kBytesPerThread / bytes, 1),
                         [&](index_t task) {
                           const index_t part = task % parts, block = task / parts;
                           const index_t channel = block % channel_steps * channel_step_;
                           run_task({block / channel_steps,
                                     channel,
                                     std::min(channel_step_, problem_.channels - channel),
                                     {part * depth / parts, (part + 1) * depth / parts}});
                         });
  }

 private:
  // A tap: its offset from the window's first input, and its indices.
  struct TapOffset {
    index_t offset, z, y, x;
  };
  // Planes of inputs of `channels` channels, from `channel` on, of one sample.
  struct Task {
    index_t sample, channel, channels;
    ops::Span planes;
  };

  // From the number of a tap, (k_d * kernel_h + k_h) * kernel_w + k_w; steps are those of the sums.
  TapOffset tap_offset(index_t tap) const {
    const index_t row = tap / dims_[2].kernel;
    const index_t z = row / dims_[1].kernel * dims_[0].dilation;
    const index_t y = row % dims_[1].kernel * dims_[1].dilation;
    const index_t x = tap % dims_[2].kernel * dims_[2].dilation;
    return {z * step_z_ + y * step_y_ + x * step_x_, z, y, x};
  }

  // The inputs' gradient at the first channel of a task.
  Storage* target(const Task& task) const {
    return static_cast<Storage*>(in_.data) + task.sample * in_.strides[0] +
           task.channel * in_.strides[1];
  }

  // Zeros the task's planes and adds to them, or sums up in separate memory and writes the planes.
  void run_task(const Task& task) const {
    if (!apart_) {
      for_targets(task, [](Storage& element, index_t) { element = ops::store_as<Storage>(T{}); });
      return spread(task, target(task), in_.strides[1]);
    }
    static thread_local Scratch scratch;
    const index_t first = task.planes.begin * step_z_;
    T* const sums = scratch.take<T>(task.planes.size() * step_z_);
    std::fill_n(sums, task.planes.size() * step_z_, T{});
    spread(task, sums - first, 1);
    for_targets(task, [&](Storage& element, index_t place) {
      element = ops::store_as<Storage>(sums[place - first]);
    });
  }

  // Calls f(element, its index in the array of sums) for the inputs of a task.
  template <class F>
  void for_targets(const Task& task, const F& f) const {
    Storage* const to = target(task);
    for (index_t z = task.planes.begin; z < task.planes.end; ++z) {
      for (index_t y = 0; y < dims_[1].in_extent; ++y) {
        Storage* const row = to + z * in_.strides[2] + y * in_.strides[3];
        const index_t place = z * step_z_ + y * step_y_;
        if (!channels_adjacent_) {
          for (index_t x = 0; x < dims_[2].in_extent; ++x) {
            f(row[x * in_.strides[4]], place + x * step_x_);
          }
          continue;
        }
        for (index_t x = 0; x < dims_[2].in_extent; ++x) {
          for (index_t c = 0; c < task.channels; ++c) {
            f(row[x * in_.strides[4] + c], place + x * step_x_ + c);
          }
        }
      }
    }
  }

  // A row of outputs, and the first input of its windows along depth and height, which is negative
  // where a window begins before the array. `to`: the sums, at the index 0 of all dims.
  template <class Element>
  struct Row {
    const Storage* grads;
    const Tap* taps;
    Element* to;
    index_t z, y;
  };

  // All outputs that may have a tap in the task's planes. A row is cut in three: only the windows
  // of the middle piece are inside the array along the width, and skip the check of each tap.
  template <class Element>
  void spread(const Task& task, Element* to, index_t channel_stride) const {
    const auto reached = [](const ops::PoolDim& dim, index_t lo, index_t hi) {
      return ops::Span{dim.outputs_of(lo).begin, dim.outputs_of(hi - 1).end};
    };
    const ops::Span depth = reached(dims_[0], task.planes.begin, task.planes.end);
    const ops::Span height = reached(dims_[1], 0, dims_[1].in_extent);
    const ops::Span width = reached(dims_[2], 0, dims_[2].in_extent);
    ops::Span inner = width;  // windows that are inside along the width
    while (inner.size() > 0 && dims_[2].first_of(inner.begin) < 0) ++inner.begin;
    while (inner.size() > 0 && dims_[2].end_of(inner.end - 1) > dims_[2].in_extent) --inner.end;
    const SpatialArray &grad = problem_.out, &taps = problem_.taps;
    const auto at = [&](const SpatialArray& array, index_t z, index_t y) {
      return task.sample * array.strides[0] + task.channel * array.strides[1] +
             z * array.strides[2] + y * array.strides[3];
    };
    for (index_t z = depth.begin; z < depth.end; ++z) {
      const index_t first_z = dims_[0].first_of(z);
      const bool holds_z = first_z >= task.planes.begin && dims_[0].end_of(z) <= task.planes.end;
      for (index_t y = height.begin; y < height.end; ++y) {
        const index_t first_y = dims_[1].first_of(y);
        const bool holds = holds_z && first_y >= 0 && dims_[1].end_of(y) <= dims_[1].in_extent;
        const Row<Element> row{static_cast<const Storage*>(grad.data) + at(grad, z, y),
                               static_cast<const Tap*>(taps.data) + at(taps, z, y), to, first_z,
                               first_y};
        add<false>(task, row, {width.begin, inner.begin}, channel_stride);
        if (holds && !tap_offsets_.empty()) {
          add<true>(task, row, inner, channel_stride);
        } else {
          add<false>(task, row, inner, channel_stride);
        }
        add<false>(task, row, {inner.end, width.end}, channel_stride);
      }
    }
  }

  // Adds the gradients of the outputs [xs.begin, xs.end) of a row. kHeld: all of their windows are
  // in the task's planes, so no tap is checked, and its offset comes from the table. Element is T,
  // or Storage where no input has two terms, so that each is rounded once.
  template <bool kHeld, class Element>
  void add(const Task& task, const Row<Element> row, ops::Span xs, index_t channel_stride) const {
    const index_t grad_x = problem_.out.strides[4], grad_c = problem_.out.strides[1];
    const index_t taps_x = problem_.taps.strides[4], taps_c = problem_.taps.strides[1];
    const TapOffset* const offsets = tap_offsets_.data();
    const index_t volume = volume_, channels = task.channels;
    for (index_t x = xs.begin; x < xs.end; ++x) {
      const index_t first = dims_[2].first_of(x);
      const index_t origin = row.z * step_z_ + row.y * step_y_ + first * step_x_;
      for (index_t c = 0; c < channels; ++c) {
        const index_t tap = row.taps[x * taps_x + c * taps_c];
        if (tap >= volume) continue;  // no tap
        index_t to = origin + c * channel_stride;
        if constexpr (kHeld) {
          to += offsets[tap].offset;
        } else {
          const TapOffset where = tap_offset(tap);
          if (!inside(task, row.z + where.z, row.y + where.y, first + where.x)) continue;
          to += where.offset;
        }
        const T value = ops::load_as(row.grads[x * grad_x + c * grad_c]);
        if constexpr (std::is_same_v<Element, T>) {
          row.to[to] += value;
        } else {
          row.to[to] = ops::store_as<Storage>(ops::load_as(row.to[to]) + value);
        }
      }
    }
  }

  // Whether an input belongs to the task; others are in another task, or outside of the array.
  bool inside(const Task& task, index_t z, index_t y, index_t x) const {
    return z >= task.planes.begin && z < task.planes.end && y >= 0 && y < dims_[1].in_extent &&
           x >= 0 && x < dims_[2].in_extent;
  }

  const ops::MaxProblem& problem_;
  const SpatialArray& in_;
  const ops::PoolDim (&dims_)[ops::kSpatialDims];
  const bool channels_adjacent_;  // channels are adjacent in the target
  const index_t channel_step_;
  index_t volume_;                      // taps of a window
  bool overlaps_ = false;               // windows share inputs
  bool apart_;                          // sums are formed in separate memory
  index_t step_z_, step_y_, step_x_;    // of the sums, in either memory
  std::vector<TapOffset> tap_offsets_;  // by tap; empty if there are too many
};

}  // namespace pydist::cpu
