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
//
// With N sums per thread, of adjacent channels, there is a step before: each thread takes over N
// sums of one channel. Entry t * N + e of the shared memory has the channel (t * N + e) % C, where
// C channels are a block's; C divides kThreads, so entries t, t + kThreads, ... have one channel.
template <bool kMoments, int N = 1>
struct RowMerge {
  static constexpr int kThreads = 256;
  struct Shared {
    RowMoments parts[kThreads * N];
  };
  struct Thread {
    RowMoments own[N];  // or sums, as in merged_parts; in the tree only the first
    int width;          // active threads; kThreads before the tree
  };

  // The steps until `results` threads have the sums.
  static PYDIST_HD index_t merge_steps(int results) {
    index_t steps = N > 1 ? 1 : 0;
    for (int width = kThreads; width > results; width /= 2) ++steps;
    return steps;
  }

  PYDIST_HD void load(index_t, index_t step, int thread, Thread& state, Shared& shared) const {
    if (N > 1 && step == 0) {
      PYDIST_UNROLLED
      for (int e = 0; e < N; ++e) shared.parts[thread * N + e] = state.own[e];
      return;
    }
    state.width /= 2;
    shared.parts[thread] = state.own[0];
  }

  PYDIST_HD void compute(int thread, const Shared& shared, Thread& state) const {
    if (N > 1 && state.width == kThreads) {
      state.own[0] = shared.parts[thread];
      PYDIST_ROLLED
      for (int i = 1; i < N; ++i) merge(state.own[0], shared.parts[thread + i * kThreads]);
      return;
    }
    if (thread < state.width) merge(state.own[0], shared.parts[thread + state.width]);
  }

 private:
  static PYDIST_HD void merge(RowMoments& own, const RowMoments& other) {
    if constexpr (kMoments) {
      own.merge(other);
    } else {
      own.mean += other.mean;
      own.m2 += other.m2;
      own.count += other.count;
    }
  }
};

// Moments of x, or sums of the gradient, of one part of the positions for some rows a block.
//
// Index formula: block = (sample, if rows have samples; block of `lanes` * N channels; part).
// Thread
//   t has the channels t % lanes * N + e of them, 0 <= e < N, and the positions begin(part) +
//   t / lanes, + 256 / lanes, ...; it sums up in T, and the sums of the threads are merged in
//   double.
// Threads: 256 per block. Channels-last, neighboring lanes read neighboring channels (`lanes` of up
//   to 32), as vectors of N; else neighboring positions (`lanes` = N = 1).
// Traffic: reads x (and grad) once, writes 16 bytes per part and row (24 with learned slopes).
// Proof: tests/native/test_norm.cpp emulates it against plain loops, in three thread orders.
// CPU code: another form of the sums (cpu.cpp has the reason).
template <bool kMoments, Activation kActivation, class Storage, int N>
struct NormSumsBody : RowMerge<kMoments, N> {
  using T = accumulator_t<Storage>;
  using RowMerge<kMoments, N>::kThreads;
  using typename RowMerge<kMoments, N>::Thread;
  static constexpr int kTileBlocks = 3;  // 80 registers: sums of N channels
  NormProblem problem;
  int lanes;  // adjacent vectors of channels of a block

  static NormSumsBody make(const NormProblem& problem) {
    NormSumsBody body{{}, problem, 1};
    const index_t channels = problem.shape.channels_last ? problem.shape.channels : 1;
    while (body.lanes < launch::kWarp && body.lanes * N < channels) body.lanes *= 2;
    return body;
  }

  PYDIST_HD int block_channels() const { return lanes * N; }
  PYDIST_HD index_t channel_blocks() const {
    return ceil_div(problem.shape.channels, block_channels());
  }
  PYDIST_HD index_t blocks() const {
    return (problem.shape.per_sample ? problem.shape.samples : 1) * channel_blocks() *
           problem.parts;
  }
  PYDIST_HD index_t steps(index_t) const { return this->merge_steps(block_channels()); }

  // The part and the first channel of a block, and the sample with which it starts.
  struct BlockStart {
    index_t part, channel, sample;
  };
  PYDIST_HD BlockStart start_of(index_t block) const {
    const index_t group = block / problem.parts;
    return {block % problem.parts, group % channel_blocks() * block_channels(),
            group / channel_blocks()};
  }

  PYDIST_HD void begin(index_t block, int thread, Thread& state) const {
    BlockStart at = start_of(block);
    at.channel += thread % lanes * N;
    PYDIST_UNROLLED
    for (int e = 0; e < N; ++e) state.own[e] = {0, 0, 0};
    state.width = kThreads;
    const index_t begin = problem.part_begin(at.part) + thread / lanes;
    const index_t end = problem.part_begin(at.part + 1);
    const index_t samples = problem.shape.per_sample ? at.sample + 1 : problem.shape.samples;
    if (at.channel >= problem.shape.channels || begin >= end || at.sample >= samples) return;
    if constexpr (kMoments) {
      moments(at, samples, begin, end, state.own);
    } else {
      sums(at, samples, begin, end, state.own);
    }
  }

  PYDIST_HD void end(index_t block, int thread, const Thread& state) const {
    const BlockStart at = start_of(block);
    const index_t channel = at.channel + thread;
    if (thread >= block_channels() || channel >= problem.shape.channels) return;
    set_sums<kMoments>(problem, at.part, problem.shape.row(at.sample, channel), state.own[0]);
  }

 private:
  using Elements = Vector<Storage, N>;

  // Sums of x - shift and of its square, where the shift is the thread's first value. Its squared
  // distance from the mean is one of the terms of the result, so the canceling part in
  // shifted_moments is at most that term times the number of the thread's values.
  PYDIST_HD void moments(const BlockStart& at, index_t samples, index_t begin, index_t end,
                         RowMoments (&found)[N]) const {
    const auto* const x = static_cast<const Storage*>(problem.x);
    const index_t step = problem.shape.position_stride();
    T shift[N], sum[N]{}, squares[N]{};
    const Elements first = Elements::load(x + problem.shape.offset(at.sample, at.channel, begin));
    PYDIST_UNROLLED
    for (int e = 0; e < N; ++e) shift[e] = load_as(first.element[e]);
    for (index_t sample = at.sample; sample < samples; ++sample) {
      const Storage* const line = x + problem.shape.offset(sample, at.channel, begin);
      every_nth(end - begin,
                launch::Move{[=](index_t p) { return Elements::load(line + p * step); },
                             [&](index_t, const Elements& values) {
                               PYDIST_UNROLLED
                               for (int e = 0; e < N; ++e) {
                                 const T centered = load_as(values.element[e]) - shift[e];
                                 sum[e] += centered;
                                 squares[e] += centered * centered;
                               }
                             }});
    }
    const index_t count = (samples - at.sample) * ceil_div(end - begin, kThreads / lanes);
    PYDIST_UNROLLED
    for (int e = 0; e < N; ++e) {
      found[e] = shifted_moments(static_cast<double>(count), static_cast<double>(shift[e]),
                                 static_cast<double>(sum[e]), static_cast<double>(squares[e]));
    }
  }

  PYDIST_HD void sums(const BlockStart& at, index_t samples, index_t begin, index_t end,
                      RowMoments (&found)[N]) const {
    const index_t step = problem.shape.position_stride(), rows = problem.shape.rows();
    const T* const values =
        static_cast<const T*>(problem.values) + problem.shape.row(at.sample, at.channel);
    using Values = Vector<T, N>;
    const Values mean = Values::load(values), factor = Values::load(values + rows);
    const Values offset = Values::load(values + 2 * rows);
    Values learned{};
    if (kActivation == Activation::kPrelu) learned = Values::load(values + 3 * rows);
    T sum[N]{}, products[N]{}, slopes[N]{};
    struct Pair {
      Elements x, grad;
    };
    for (index_t sample = at.sample; sample < samples; ++sample) {
      const index_t line = problem.shape.offset(sample, at.channel, begin);
      const Storage* const x = static_cast<const Storage*>(problem.x) + line;
      const Storage* const grads = static_cast<const Storage*>(problem.grad) + line;
      every_nth(end - begin,
                launch::Move{
                    [=](index_t p) {
                      return Pair{Elements::load(x + p * step), Elements::load(grads + p * step)};
                    },
                    [&](index_t, const Pair& pair) {
                      PYDIST_UNROLLED
                      for (int e = 0; e < N; ++e) {
                        const T slope = kActivation == Activation::kPrelu
                                            ? learned.element[e]
                                            : static_cast<T>(problem.slope);
                        const T centered = load_as(pair.x.element[e]) - mean.element[e];
                        const T value = normalized(centered, factor.element[e], offset.element[e]);
                        const T given = load_as(pair.grad.element[e]);
                        const T grad = activation_gradient<kActivation>(value, given, slope);
                        sum[e] += grad;
                        products[e] += grad * centered;
                        if (kActivation == Activation::kPrelu) {
                          slopes[e] += slope_gradient(value, given);
                        }
                      }
                    }});
    }
    PYDIST_UNROLLED
    for (int e = 0; e < N; ++e) {
      found[e] = {static_cast<double>(slopes[e]), static_cast<double>(sum[e]),
                  static_cast<double>(products[e])};
    }
  }

  // Visits the positions of one thread. Several loads are in flight before the first is added
  // (launch::LaneLoop): sums are bound by memory latency otherwise.
  template <class At>
  PYDIST_HD void every_nth(index_t count, const At& at) const {
    launch::LaneLoop{0, kThreads / lanes}(count, at);
  }
};

// Calls f(body) with the body for a problem. Storage and kActivation are the problem's. Vectors are
// as long as the accumulators allow: each channel of a lane needs some of them.
template <bool kMoments, Activation kActivation, class Storage, class F>
void with_norm_sums_body(const NormProblem& problem, const F& f) {
  constexpr int kWide = kVectorElements<accumulator_t<Storage>>;
  const void* const grad = kMoments ? nullptr : problem.grad;
  const void* const values = kMoments ? nullptr : problem.values;
  if (problem.shape.channels_last &&
      has_norm_vectors<Storage>(problem, {problem.x, grad}, {values}, kWide)) {
    f(NormSumsBody<kMoments, kActivation, Storage, kWide>::make(problem));
  } else {
    f(NormSumsBody<kMoments, kActivation, Storage, 1>::make(problem));
  }
}

// The sums of all parts, stored in the place of part 0.
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
  PYDIST_HD index_t steps(index_t) const { return this->merge_steps(1); }
  PYDIST_HD void begin(index_t row, int thread, Thread& state) const {
    state = {{merged_parts<kMoments>(problem, row, thread, kThreads)}, kThreads};
  }
  PYDIST_HD void end(index_t row, int thread, const Thread& state) const {
    if (thread == 0) set_sums<kMoments>(problem, 0, row, state.own[0]);
  }
};

}  // namespace pydist::ops
