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

constexpr index_t kBufferBytes = 16 << 10;  // of some lines: they stay in the first cache
constexpr index_t kSumsBytes = 512 << 10;   // of a task's sums: they stay in the second cache
constexpr index_t kStreamBytes = 32 << 20;  // larger targets are written past the caches
constexpr index_t kPageBytes = 4 << 10;     // hardware fetches ahead as far as pages reach
constexpr index_t kMinLines = 4;            // of a task, along depth and height
constexpr index_t kChannelStep = 16;

// One call.
//
// Forward: lines of targets are added up along the height (gather) in each plane of sources, then
// along the width, and planes of those along the depth, into the targets (scatter). So each source
// is fetched once. Backward is the adjoint: lines of sources are added up along the depth for each
// plane of targets, then along the width, and lines of those along the height, into the targets.
template <class Storage, PoolOp kOp>
class Pooler : PoolPasses<Storage, kOp> {
  using Passes = PoolPasses<Storage, kOp>;
  using Passes::depth_, Passes::height_, Passes::width_, Passes::depth_spans_;
  using Passes::height_spans_, Passes::factors_, Passes::lines_, Passes::stream_;
  using Passes::kForward, Passes::problem_, Passes::source_, Passes::target_, Passes::together_;
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
  // Of all sources that are summed, and of all targets.
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

  // Tasks are blocks along the height in which the depth runs: their sums stay in the second cache,
  // and lines on their way there in the first.
  void choose_steps() {
    const index_t pitch = std::max<index_t>(width_.pitch * static_cast<index_t>(sizeof(T)), 1);
    if (together_) {
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

  // Planes of sums that are kept, forward.
  index_t slots() const { return planes_ + 1; }

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

  void forward(const Task& task) const {
    const index_t plane = task.lines * line_pitch(task);
    index_t first = depth_spans_[static_cast<std::size_t>(task.depth.begin)].begin, next = first;
    for (index_t z = task.depth.begin; z < task.depth.end; ++z) {
      const PoolSpan planes = depth_spans_[static_cast<std::size_t>(z)];
      if (problem_.accumulate && planes.begin == planes.end) continue;
      if (planes.end - first > slots()) {  // those that are used again move to the front
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
        sum.ahead = kPageBytes / static_cast<index_t>(sizeof(Storage));
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
