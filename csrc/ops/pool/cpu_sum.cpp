// Sums over pooling windows on the CPU.
//
// Not the shared body. A body's thread sums the full window of its target: kernel volume reads and
// index computations per element. Here the sum over the window goes dim by dim, over full lines, by
// loops that are compiled per instruction set; intermediate lines stay in the caches.
//
//   forward:   sources --height--> lines --width--> planes of sums --depth--> targets
//   backward:  sources --depth--> lines --width--> a plane of sums --height--> targets
//
// Traffic: each source is read once from memory, each target written once. The shared body reads an
// input in all windows that contain it: 27 / 8 of them for kernel 3 and stride 2.
// Measured on one thread with AVX-512, float, 16 x 64 x 128 x 128 and 32 x 32 x 64 x 64, kernels 2
// and 3 with stride 2, both layouts, the shared body takes 2.7 to 7.5 times as long forward and 15
// to 37 times backward.
//
// cpu_sum_plan.hpp has the sources of a target and the layout of a line; cpu_sum_passes.hpp has the
// two steps, gather and scatter; this file cuts the work into tasks.
// Proof: tests/native/test_pool_sum.cpp against plain loops, tests/kernels/test_pool_ways.py.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "launch/cpu.hpp"
#include "launch/scratch.hpp"
#include "launch/thread_pool.hpp"
#include "ops/common/dispatch.hpp"
#include "ops/pool/cpu_sum_passes.hpp"
#include "ops/pool/kernels.hpp"

namespace pydist::cpu {
namespace {

using ops::PoolOp;
using ops::PoolProblem;
using ops::Span;

constexpr index_t kBufferBytes = 16 << 10;  // of some lines: they stay in the L1 cache
constexpr index_t kSumsBytes = 512 << 10;   // of a task's sums: they stay in the L2 cache
constexpr index_t kStreamBytes = 32 << 20;  // larger targets are written past the caches
constexpr index_t kPageBytes = 4 << 10;     // hardware prefetches up to the end of a page
constexpr index_t kMinLines = 4;            // of a task, along depth and height
constexpr index_t kChannelStep = 16;

// One call.
//
// Forward: in each plane of sources, lines are summed along the height (gather) and the width into
// a plane of sums; planes of sums are summed along the depth into the targets (scatter). Backward
// is the adjoint: for each plane of targets, lines of sources are summed along the depth and the
// width, and the lines of that plane along the height into the targets.
template <class Storage, PoolOp kOp>
class Pooler : PoolPasses<Storage, kOp> {
  using Passes = PoolPasses<Storage, kOp>;
  using Passes::depth_, Passes::height_, Passes::width_, Passes::depth_spans_;
  using Passes::height_spans_, Passes::factors_, Passes::lines_, Passes::stream_;
  using Passes::kForward, Passes::problem_, Passes::source_, Passes::target_,
      Passes::channels_adjacent_;
  using Passes::line_pitch, Passes::gather, Passes::scatter;
  using typename Passes::T;
  using typename Passes::Task;

 public:
  explicit Pooler(const PoolProblem& problem) : Passes(problem) {
    for (const PoolSpan& span : depth_spans_) planes_ = std::max(planes_, span.end - span.begin);
  }

  void run() {
    if (depth_.size() == 0 || height_.size() == 0 || width_.targets.size() == 0) return;
    if (problem_.batch * problem_.channels == 0) return;
    choose_steps();
    const index_t channel_steps = ceil_div(problem_.channels, channel_step_);
    const index_t height_steps = ceil_div(height_.size(), height_step_);
    const index_t outer = problem_.batch * channel_steps * height_steps;
    const index_t depth_steps = std::clamp<index_t>(4 * launch::num_threads() / outer, 1,
                                                    ceil_div(depth_.size(), kMinLines));
    const index_t tasks = outer * depth_steps;
    launch::parallel_for(
        tasks, std::max<index_t>(tasks * launch::kBytesPerThread / (bytes_in() + bytes_out()), 1),
        [&](index_t task) {
          const index_t z = task % depth_steps;
          const index_t y = task / depth_steps % height_steps * height_step_;
          const index_t block = task / depth_steps / height_steps;
          run_task(block / channel_steps, block % channel_steps * channel_step_,
                   {z * depth_.size() / depth_steps, (z + 1) * depth_.size() / depth_steps},
                   {y, std::min(y + height_step_, height_.size())});
        });
  }

 private:
  // Bytes of all summed sources, and of all targets: a bound of the traffic.
  index_t bytes_in() const {
    const auto extent = [](const std::vector<PoolSpan>& spans) {
      return spans.back().end - spans.front().begin;
    };
    return problem_.batch * problem_.channels * extent(depth_spans_) * extent(height_spans_) *
           width_.sources.size() * static_cast<index_t>(sizeof(Storage));
  }
  index_t bytes_out() const {
    return problem_.batch * problem_.channels * depth_.size() * height_.size() *
           width_.targets.size() * static_cast<index_t>(sizeof(Storage));
  }

  // Sizes of a task. A task has some channels and some lines along the height, and walks the depth:
  // its planes of sums stay in the L2 cache (kSumsBytes), its buffered lines in L1 (kBufferBytes).
  void choose_steps() {
    const index_t pitch = std::max<index_t>(width_.pitch * static_cast<index_t>(sizeof(T)), 1);
    if (channels_adjacent_) {
      channel_step_ = std::max(kBufferBytes / pitch / kChannelStep, index_t{1}) * kChannelStep;
      channel_step_ = std::min(channel_step_, problem_.channels);
    }
    lines_ = std::max<index_t>(kBufferBytes / (pitch * channel_step_), 1);
    const index_t line = width_.line_pitch * static_cast<index_t>(sizeof(T)) * channel_step_ *
                         (kForward ? slots() : 1);
    const index_t lines = kSumsBytes / line;
    stream_ = !problem_.accumulate && bytes_out() >= kStreamBytes;
    height_step_ = std::clamp(kForward ? lines : lines * problem_.dims[1].stride,
                              std::min(kMinLines, height_.size()), height_.size());
  }

  // Planes of sums that a task keeps, forward: those of one target, and one to be filled.
  index_t slots() const { return planes_ + 1; }

  // One task: `depth` and `height` are the targets' indices from the first target of the call.
  void run_task(index_t sample, index_t channel, Span depth, Span height) const {
    Task task{};
    task.channels = std::min(channel_step_, problem_.channels - channel);
    task.source = static_cast<const Storage*>(source_.data) + sample * source_.strides[0] +
                  channel * source_.strides[1] + width_.sources.begin * source_.strides[4];
    task.target = static_cast<Storage*>(target_.data) + sample * target_.strides[0] +
                  channel * target_.strides[1] + depth_.begin * target_.strides[2] +
                  height_.begin * target_.strides[3] + width_.targets.begin * target_.strides[4];
    task.depth = depth;
    task.height = height;
    const PoolSpan* const lines = height_spans_.data();
    task.lines = kForward ? height.size() : lines[height.end - 1].end - lines[height.begin].begin;
    take_memory(task);
    if constexpr (kForward) {
      forward(task);
    } else {
      backward(task);
    }
  }

  // The memory of a task, in one block of the thread: a buffer of lines, their even and odd halves
  // (for stride 2), the planes of sums.
  void take_memory(Task& task) const {
    static thread_local Scratch scratch;
    const index_t size = std::min(lines_, task.lines) * width_.pitch * task.channels + kMaxTaps;
    const index_t half = width_.padded && problem_.dims[2].stride == 2 ? size : 0;
    const index_t sums = (kForward ? slots() : 1) * task.lines * line_pitch(task);
    task.buffer = scratch.take<T>(size + 2 * half + sums);
    task.even = task.buffer + size;
    task.odd = task.even + half;
    task.sums = task.odd + half;
    std::fill_n(task.buffer, size, T{});  // zeros around the sources stay
  }

  // Planes of sources become planes of sums once, in order; each target then adds up the planes of
  // its window. `first` is the plane in slot 0, `next` the first missing plane.
  void forward(const Task& task) const {
    const index_t plane = task.lines * line_pitch(task);
    index_t first = depth_spans_[static_cast<std::size_t>(task.depth.begin)].begin, next = first;
    for (index_t z = task.depth.begin; z < task.depth.end; ++z) {
      const PoolSpan planes = depth_spans_[static_cast<std::size_t>(z)];
      if (problem_.accumulate && planes.begin == planes.end) continue;
      if (planes.end - first > slots()) {  // planes that later targets sum move to the front
        const index_t kept = std::max<index_t>(next - planes.begin, 0);
        std::copy_n(task.sums + (next - kept - first) * plane, kept * plane, task.sums);
        first = planes.begin;
      }
      for (next = std::max(next, planes.begin); next < planes.end; ++next) {
        PoolLines<Storage, T, T> sum{};
        sum.from = task.source + next * source_.strides[2];
        sum.row = source_.strides[3];
        sum.spans = height_spans_.data() + task.height.begin;
        sum.span_step = 1;
        sum.factors = factors_[1].data() + height_.begin + task.height.begin;
        sum.target_factor = 1;
        sum.prefetch = kPageBytes / static_cast<index_t>(sizeof(Storage));
        gather(task, sum, task.sums + (next - first) * plane);
      }
      const PoolSpan slots{planes.begin - first, planes.end - first};
      PoolLines<T, Storage, T> sum{};
      sum.row = plane;
      sum.line = line_pitch(task);
      sum.from = task.sums;
      sum.spans = &slots;
      sum.factors = factors_[0].data() + depth_.begin + z;
      scatter(task, sum, z);
    }
  }

  // Each plane of targets sums its planes of sources: with overlapping windows a source plane is
  // read once per target plane, from the cache.
  void backward(const Task& task) const {
    const PoolSpan* const spans = height_spans_.data() + task.height.begin;
    for (index_t z = task.depth.begin; z < task.depth.end; ++z) {
      const PoolSpan& planes = depth_spans_[static_cast<std::size_t>(z)];
      if (problem_.accumulate && planes.begin == planes.end) continue;
      PoolLines<Storage, T, T> planes_sum{};
      planes_sum.from = task.source + spans->begin * source_.strides[3];
      planes_sum.row = source_.strides[2];
      planes_sum.line = source_.strides[3];
      planes_sum.spans = &planes;
      planes_sum.factors = factors_[0].data();
      planes_sum.row_factor = 1;
      gather(task, planes_sum, task.sums);
      PoolLines<T, Storage, T> sum{};
      sum.row = line_pitch(task);
      sum.from = task.sums - spans->begin * sum.row;
      sum.spans = spans;
      sum.span_step = 1;
      sum.factors = factors_[1].data();
      sum.row_factor = 1;
      scatter(task, sum, z);
    }
  }

  index_t planes_ = 1;                          // that a target sums, at most
  index_t channel_step_ = 1, height_step_ = 1;  // of a task
};

template <PoolOp kOp>
void pool(const PoolProblem& problem) {
  ops::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
    Pooler<Storage, kOp>(problem).run();
  });
}

}  // namespace

void pool_sum_forward(const PoolProblem& problem) { pool<PoolOp::kForward>(problem); }

void pool_sum_backward(const PoolProblem& problem) { pool<PoolOp::kBackward>(problem); }

}  // namespace pydist::cpu
