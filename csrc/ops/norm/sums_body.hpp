// Sums of norms on a device: moments of x, or sums of the gradient. A reduction in two launches.
//
// First, blocks of threads sum up a part of the positions for some rows each (NormSumsBody); then a
// block per row merges the parts (NormMergeBody). Between them the sums are stored in double. No
// atomics are used: every sum has one order, which depends only on the problem.
#pragma once

#include "launch/decomposition.hpp"
#include "launch/run_body.hpp"
#include "ops/common/half.hpp"
#include "ops/norm/problem.hpp"

namespace pydist::ops {

// Merges the sums of a block's threads: a tree, in shared memory. In each step the lower half of
// the active threads merges the sums of the upper half.
template <bool kMoments>
struct RowMerge {
  static constexpr int kThreads = 256;
  struct Shared {
    RowMoments parts[kThreads];
  };
  struct Thread {
    RowMoments own;  // or sums, as in merged_parts
    int width;       // active threads
  };

  PYDIST_HD void load(index_t, index_t, int thread, Thread& state, Shared& shared) const {
    state.width /= 2;
    shared.parts[thread] = state.own;
  }

  PYDIST_HD void compute(int thread, const Shared& shared, Thread& state) const {
    if (thread >= state.width) return;
    const RowMoments& other = shared.parts[thread + state.width];
    if constexpr (kMoments) {
      state.own.merge(other);
    } else {
      state.own.mean += other.mean;
      state.own.m2 += other.m2;
      state.own.count += other.count;
    }
  }
};

// Moments of x, or sums of the gradient, of one part of the positions for some rows a block.
//
// Index formula: block = (sample, if rows have samples; block of `lanes` channels; part). Thread t
//   has the channel t % lanes of them and the positions begin(part) + t / lanes, + 256 / lanes,
//   ...; it sums up in T, and the sums of the threads are merged in double.
// Threads: 256 per block. Channels-last, neighboring lanes read neighboring channels (`lanes` of up
//   to 32), else neighboring positions (`lanes` = 1).
// Traffic: reads x (and grad) once, writes 16 bytes per part and row (24 with learned slopes).
// Proof: tests/native/test_norm.cpp emulates it against plain loops, in three thread orders.
// CPU code: another form of the sums (cpu.cpp has the reason).
template <bool kMoments, Activation kActivation, class Storage>
struct NormSumsBody : RowMerge<kMoments> {
  using T = accumulator_t<Storage>;
  using RowMerge<kMoments>::kThreads;
  using typename RowMerge<kMoments>::Thread;
  NormProblem problem;
  int lanes;  // adjacent channels of a block

  static NormSumsBody make(const NormProblem& problem) {
    NormSumsBody body{{}, problem, 1};
    const index_t channels = problem.shape.channels_last ? problem.shape.channels : 1;
    while (body.lanes < launch::kWarp && body.lanes < channels) body.lanes *= 2;
    return body;
  }

  PYDIST_HD index_t channel_blocks() const { return ceil_div(problem.shape.channels, lanes); }
  PYDIST_HD index_t blocks() const {
    return (problem.shape.per_sample ? problem.shape.samples : 1) * channel_blocks() *
           problem.parts;
  }
  PYDIST_HD index_t steps(index_t) const {
    index_t steps = 0;
    for (int width = kThreads; width > lanes; width /= 2) ++steps;
    return steps;
  }

  // The part and the channel of a thread, and the sample with which it starts.
  struct Place {
    index_t part, channel, sample;
  };
  PYDIST_HD Place place(index_t block, int thread) const {
    const index_t group = block / problem.parts;
    return {block % problem.parts, group % channel_blocks() * lanes + thread % lanes,
            group / channel_blocks()};
  }

  PYDIST_HD void begin(index_t block, int thread, Thread& state) const {
    const Place at = place(block, thread);
    state = {{0, 0, 0}, kThreads};
    if (at.channel >= problem.shape.channels) return;
    const index_t begin = problem.part_begin(at.part) + thread / lanes;
    const index_t end = problem.part_begin(at.part + 1);
    const index_t samples = problem.shape.per_sample ? at.sample + 1 : problem.shape.samples;
    if constexpr (kMoments) {
      state.own = moments(at, samples, begin, end);
    } else {
      state.own = sums(at, samples, begin, end);
    }
  }

  PYDIST_HD void end(index_t block, int thread, const Thread& state) const {
    const Place at = place(block, thread);
    if (thread >= lanes || at.channel >= problem.shape.channels) return;
    set_sums<kMoments>(problem, at.part, problem.shape.row(at.sample, at.channel), state.own);
  }

 private:
  // Sums of x - shift and of its square, where the shift is the thread's first value. Its squared
  // distance from the mean is one of the terms of the result, so the canceling part in
  // shifted_moments is at most that term times the number of the thread's values.
  PYDIST_HD RowMoments moments(const Place& at, index_t samples, index_t begin, index_t end) const {
    if (begin >= end || at.sample >= samples) return {0, 0, 0};
    const auto* const x = static_cast<const Storage*>(problem.x);
    const index_t step = problem.shape.position_stride();
    const T shift = load_as(x[problem.shape.offset(at.sample, at.channel, begin)]);
    T sum{}, squares{};
    for (index_t sample = at.sample; sample < samples; ++sample) {
      const Storage* const line = x + problem.shape.offset(sample, at.channel, begin);
      every_nth(end - begin, launch::Move{[=](index_t p) { return line[p * step]; },
                                          [&](index_t, const Storage& value) {
                                            const T centered = load_as(value) - shift;
                                            sum += centered;
                                            squares += centered * centered;
                                          }});
    }
    const index_t count = (samples - at.sample) * ceil_div(end - begin, kThreads / lanes);
    return shifted_moments(static_cast<double>(count), static_cast<double>(shift),
                           static_cast<double>(sum), static_cast<double>(squares));
  }

  PYDIST_HD RowMoments sums(const Place& at, index_t samples, index_t begin, index_t end) const {
    if (begin >= end) return {0, 0, 0};
    const index_t step = problem.shape.position_stride(), rows = problem.shape.rows();
    const index_t row = problem.shape.row(at.sample, at.channel);
    const T* const values = static_cast<const T*>(problem.values) + row;
    const T mean = values[0], factor = values[rows], offset = values[2 * rows];
    const T slope =
        kActivation == Activation::kPrelu ? values[3 * rows] : static_cast<T>(problem.slope);
    T sum{}, products{}, slopes{};
    struct Pair {
      Storage x, grad;
    };
    for (index_t sample = at.sample; sample < samples; ++sample) {
      const index_t line = problem.shape.offset(sample, at.channel, begin);
      const Storage* const x = static_cast<const Storage*>(problem.x) + line;
      const Storage* const grads = static_cast<const Storage*>(problem.grad) + line;
      every_nth(end - begin,
                launch::Move{[=](index_t p) { return Pair{x[p * step], grads[p * step]}; },
                             [&](index_t, const Pair& pair) {
                               const T centered = load_as(pair.x) - mean;
                               const T value = normalized(centered, factor, offset);
                               const T given = load_as(pair.grad);
                               const T grad = activation_gradient<kActivation>(value, given, slope);
                               sum += grad;
                               products += grad * centered;
                               if (kActivation == Activation::kPrelu) {
                                 slopes += slope_gradient(value, given);
                               }
                             }});
    }
    return {static_cast<double>(slopes), static_cast<double>(sum), static_cast<double>(products)};
  }

  // Visits the positions of one thread. Several loads are in flight before the first is added
  // (launch::LaneLoop): sums are bound by memory latency otherwise.
  template <class At>
  PYDIST_HD void every_nth(index_t count, const At& at) const {
    launch::LaneLoop{0, kThreads / lanes}(count, at);
  }
};

// The sums of all parts, stored as those of part 0.
//
// Threads: a block of 256 per row. One thread per row would add hundreds of parts in sequence,
//   which takes longer than reading x.
// Traffic: 16 or 24 bytes read per part and row.
// Proof: as of NormSumsBody.
template <bool kMoments>
struct NormMergeBody : RowMerge<kMoments> {
  using RowMerge<kMoments>::kThreads;
  using typename RowMerge<kMoments>::Thread;
  NormProblem problem;

  PYDIST_HD index_t blocks() const { return problem.shape.rows(); }
  PYDIST_HD index_t steps(index_t) const {
    index_t steps = 0;
    for (int width = kThreads; width > 1; width /= 2) ++steps;
    return steps;
  }
  PYDIST_HD void begin(index_t row, int thread, Thread& state) const {
    state = {merged_parts<kMoments>(problem, row, thread, kThreads), kThreads};
  }
  PYDIST_HD void end(index_t row, int thread, const Thread& state) const {
    if (thread == 0) set_sums<kMoments>(problem, 0, row, state.own);
  }
};

}  // namespace pydist::ops
