#include "cpu/pool.hpp"

#include <algorithm>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "cpu/isa.hpp"
#include "cpu/pool_plan.hpp"
#include "cpu/scratch.hpp"
#include "kernels/dispatch.hpp"
#include "launch/cpu.hpp"
#include "launch/thread_pool.hpp"

namespace pydist::cpu {
namespace {

using kernels::Activation;
using kernels::BFloat16;
using kernels::ConvArray;
using kernels::Float16;
using kernels::PoolDim;
using kernels::PoolOp;
using kernels::PoolProblem;
using kernels::Span;

constexpr index_t kBufferBytes = 16 << 10;  // of some lines: they stay in the first cache
constexpr index_t kSumsBytes = 512 << 10;   // of a task's sums: they stay in the second cache
constexpr index_t kStreamBytes = 32 << 20;  // larger targets are written past the caches
constexpr index_t kPageBytes = 4 << 10;     // hardware fetches ahead as far as pages reach
constexpr index_t kMinLines = 4;            // of a task, along depth and height
constexpr index_t kChannelStep = 16;

template <class Storage>
const auto& line_isa() {
  if constexpr (std::is_same_v<Storage, Float16>) return isa().pool_sum->lines_f16;
  if constexpr (std::is_same_v<Storage, BFloat16>) return isa().pool_sum->lines_bf16;
  if constexpr (std::is_same_v<Storage, float>) return isa().pool_sum->lines_f32;
  if constexpr (std::is_same_v<Storage, double>) return isa().pool_sum->lines_f64;
}

template <class T>
const PoolWidthIsa<T>& width_isa() {
  if constexpr (std::is_same_v<T, float>) {
    return isa().pool_sum->width_f32;
  } else {
    return isa().pool_sum->width_f64;
  }
}

// One call. `Storage` is the arrays' type, `T` the one computed in.
//
// Forward: lines of targets are added up along the height (gather) in each plane of sources, then
// along the width, and planes of those along the depth, into the targets (scatter). So each source
// is fetched once. Backward is the adjoint: lines of sources are added up along the depth for each
// plane of targets, then along the width, and lines of those along the height, into the targets.
template <class Storage, PoolOp kOp>
class Pooler {
  using T = kernels::accumulator_t<Storage>;
  static constexpr bool kForward = kOp == PoolOp::kForward;

 public:
  explicit Pooler(const PoolProblem& problem)
      : problem_(problem),
        source_(kForward ? problem.in : problem.out),
        target_(kForward ? problem.out : problem.in),
        together_(problem.channels > 1 && target_.strides[1] == 1),
        depth_(problem.targets<kOp>(0)),
        height_(problem.targets<kOp>(1)),
        width_(problem.dims[2], problem.targets<kOp>(2), together_ ? problem.channels : 1),
        depth_spans_(spans_of<kOp>(problem.dims[0], depth_)),
        height_spans_(spans_of<kOp>(problem.dims[1], height_)),
        isa_(line_isa<Storage>()),
        width_isa_(width_isa<T>()),
        rectifier_(static_cast<int>(kernels::activation_of(problem.slope))) {
    for (int dim = 0; dim < kernels::kSpatialDims; ++dim) {
      const PoolDim& along = problem.dims[dim];
      factors_[dim].assign(along.scale, along.scale + along.out_extent);
    }
    scaled_ =
        std::any_of(factors_[2].begin(), factors_[2].end(), [](T factor) { return factor != 1; });
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

  // What a task works on, and its memory.
  struct Task {
    index_t channels;
    const Storage* source;  // at its sample, channels and first position of the width
    Storage* target;        // at its sample, channels and first target of the whole
    Span depth, height;     // its targets, from the first one of the whole
    index_t lines;          // of a plane of sums: of targets forward, of sources backward
    T *buffer, *even, *odd;
    T* sums;  // [forward: planes][lines][line_pitch][channels], summed along the width
  };

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

  index_t line_pitch(const Task& task) const { return width_.line_pitch * task.channels; }

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

  // to[line][x][c] = the sum of source rows, and along the width. `sum` says which rows.
  void gather(const Task& task, PoolLines<Storage, T, T> sum, T* to) const {
    const index_t pitch = width_.pitch * task.channels, count = width_.sources.size();
    sum.to = task.buffer + (width_.sources.begin - width_.origin) * task.channels;
    sum.target = pitch;
    sum.runs = {count, task.channels, source_.strides[4], task.channels};
    sum.slope = static_cast<T>(problem_.slope);
    for (index_t y = 0; y < task.lines; y += lines_) {
      sum.targets = std::min(lines_, task.lines - y);
      if (task.channels == 1 || source_.strides[1] == 1) {
        isa_.gather[kForward ? rectifier_ : 0](sum);
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

  // Where channels are adjacent in the targets alone; along the shorter stride first.
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

  // A source, behind the ReLU of forward.
  T value_of(Storage source) const {
    const T value = kernels::load_as(source), slope = static_cast<T>(problem_.slope);
    if (!kForward || rectifier_ == 0) return value;
    if (slope == 0) return kernels::activated<Activation::kRelu>(value, slope);
    return kernels::activated<Activation::kLeakyRelu>(value, slope);
  }

  // The buffer's lines, summed along the width.
  void sum_width(const Task& task, index_t lines, T* to) const {
    const PoolDim& dim = problem_.dims[2];
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

  // The task's targets of plane z, from rows of the sums. `sum` says which.
  void scatter(const Task& task, PoolLines<T, Storage, T> sum, index_t z) const {
    sum.from += width_.first * task.channels;
    sum.to = task.target + z * target_.strides[2] + task.height.begin * target_.strides[3];
    sum.targets = task.height.size();
    sum.target = target_.strides[3];
    sum.runs = {width_.targets.size(), task.channels, task.channels, target_.strides[4]};
    sum.accumulate = problem_.accumulate;
    sum.stream = stream_;
    sum.slope = static_cast<T>(problem_.slope);
    if (!kForward && rectifier_ != 0) sum.gate = gate_of(sum.to);
    isa_.scatter[kForward ? 0 : rectifier_](sum);
  }

  // What gates a target.
  const Storage* gate_of(const Storage* target) const {
    return static_cast<const Storage*>(problem_.gate) +
           (target - static_cast<const Storage*>(target_.data));
  }

  const PoolProblem& problem_;
  const ConvArray& source_;
  const ConvArray& target_;
  const bool together_;        // channels are adjacent in the targets: lines hold many of them
  const Span depth_, height_;  // of targets
  const WidthPlan<kOp> width_;
  const std::vector<PoolSpan> depth_spans_, height_spans_;
  const PoolLineIsa<Storage, T>& isa_;
  const PoolWidthIsa<T>& width_isa_;
  std::vector<T> factors_[kernels::kSpatialDims];  // the outputs' scales
  bool scaled_;                                    // those of the width are not all 1
  index_t planes_ = 1;                             // that a target sums, at most
  index_t channel_step_ = 1, height_step_ = 1;     // of a task
  index_t lines_ = 1;                              // of a buffer, at most
  bool stream_ = false;
  const int rectifier_;  // 0 for none, as of PoolLineIsa
};

template <PoolOp kOp>
void pool(const PoolProblem& problem) {
  kernels::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
    Pooler<Storage, kOp>(problem).run();
  });
}

}  // namespace

void pool_sum_forward(const PoolProblem& problem) { pool<PoolOp::kForward>(problem); }

void pool_sum_backward(const PoolProblem& problem) { pool<PoolOp::kBackward>(problem); }

}  // namespace pydist::cpu
