// Maxima over pooling windows on the CPU: forward here, backward in cpu_max_spread.hpp; pick is the
// shared body.
//
// Forward is not the shared body, in which each thread visits the taps of its target. Here a line
// of targets visits a tap together, by a loop that is compiled per instruction set (isa_max.cpp).
// Measured on one thread with AVX-512, float, 16 x 64 x 128 x 128 and 32 x 32 x 64 x 64, kernels 2
// and 3 with stride 2, both layouts, the shared body takes 3 to 11 times as long forward, and 24 to
// 76 times backward.
//
// Threads: a task is a plane of targets of one sample, for up to 8 channels (512 where channels are
//   adjacent). Tasks share no target; each is written once, by the task of its plane and channel.
// Traffic: each source is read once per window that contains it, from the caches except for the
//   first time; each maximum and tap is written once (and read, to accumulate).
// Proof: tests/native/test_pool_max.cpp against plain loops.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "isa/isa.hpp"
#include "launch/cpu.hpp"
#include "launch/scratch.hpp"
#include "launch/thread_pool.hpp"
#include "ops/common/dispatch.hpp"
#include "ops/pool/cpu_max_spread.hpp"
#include "ops/pool/isa_tables.hpp"
#include "ops/pool/kernels.hpp"

namespace pydist::cpu {
namespace {

using ops::BFloat16;
using ops::Float16;
using ops::kNoTap;
using ops::MaxOp;
using ops::MaxProblem;
using ops::PoolDim;
using ops::Span;
using ops::SpatialArray;

constexpr index_t kChannelsAtOnce = 8;  // of a task whose lines go along the width
constexpr index_t kLanes = 512;         // of a line of channels
constexpr index_t kTapsAtOnce = 256;    // of such a line

template <class Storage>
auto maxima_of() {
  const PoolMaxTable& table = isa::chosen(PYDIST_ISA_TABLES(kPoolMax));
  if constexpr (std::is_same_v<Storage, Float16>) return table.f16;
  if constexpr (std::is_same_v<Storage, BFloat16>) return table.bf16;
  if constexpr (std::is_same_v<Storage, float>) return table.f32;
  if constexpr (std::is_same_v<Storage, double>) return table.f64;
}

// Forward. For each plane of targets, the lanes of a line are
// - channels, if those are adjacent in the target (along_channels): all lanes have the same taps,
//   so one list of taps serves a full line, and equal windows share it;
// - else positions along the width (along_width): lane j reads at stride * j, and a tap has the
//   lanes for which it is inside the array;
// - for adaptive windows, whose lengths differ along the width, the taps of one window's row
//   (along_window): a maximum over lanes follows.
template <class Storage, class Tap>
class MaxPooler {
  using T = ops::accumulator_t<Storage>;
  using Number = std::conditional_t<std::is_same_v<T, double>, std::int64_t, std::int32_t>;
  using Maximum = ops::Maximum<T, Number>;
  using Taps = ops::TapSpan<index_t>;
  using Line = PoolMaxLine<Storage, T, Number>;
  static constexpr Number kNone = kNoTap<Tap>;

 public:
  explicit MaxPooler(const MaxProblem& problem)
      : problem_(problem),
        in_(problem.in),
        out_(problem.out),
        taps_(problem.taps),
        dims_(problem.dims),
        depth_(problem.targets<MaxOp::kForward>(0)),
        height_(problem.targets<MaxOp::kForward>(1)),
        width_(problem.targets<MaxOp::kForward>(2)),
        channels_adjacent_(out_.strides[1] == 1 && problem.channels > 1),
        channel_step_(std::min(problem.channels, channels_adjacent_ ? kLanes : kChannelsAtOnce)),
        maxima_(maxima_of<Storage>()) {
    if (!channels_adjacent_ && !dims_[2].is_adaptive()) plan_width();
  }

  void run() const {
    const index_t lines = depth_.size() * height_.size() * problem_.batch * problem_.channels;
    if (lines * width_.size() == 0) return;
    const index_t channel_steps = ceil_div(problem_.channels, channel_step_);
    const index_t tasks = problem_.batch * channel_steps * depth_.size();
    const index_t bytes = lines * width_.size() * dims_[0].stride * dims_[1].stride *
                          dims_[2].stride * static_cast<index_t>(sizeof(Storage));
    launch::parallel_for(
        tasks, std::max<index_t>(tasks * launch::kBytesPerThread / bytes, 1), [&](index_t task) {
          const index_t block = task / depth_.size();
          const index_t channel = block % channel_steps * channel_step_;
          run_plane({block / channel_steps, channel, depth_.begin + task % depth_.size(), 0, 0},
                    std::min(channel_step_, problem_.channels - channel));
        });
  }

 private:
  struct Position {
    index_t sample, channel, z, y, x;
  };

  // The memory of a task. The list of taps is valid for all windows with the same part inside the
  // array, `spans`: begin and end of the taps in each dim. All inner windows share it.
  struct TaskBuffers {
    index_t channels;
    T* values;  // the maxima of a line
    Number* numbers;
    std::vector<PoolTap>& list;
    index_t spans[6] = {-1};
  };

  template <class Element>
  static Element* element(const SpatialArray& array, const Position& at) {
    return static_cast<Element*>(array.data) + offset(array, at);
  }

  static index_t offset(const SpatialArray& array, const Position& at) {
    return at.sample * array.strides[0] + at.channel * array.strides[1] + at.z * array.strides[2] +
           at.y * array.strides[3] + at.x * array.strides[4];
  }

  // For each tap along the width: its lanes, and the offset of its source for lane 0.
  void plan_width() {
    const PoolDim& dim = dims_[2];
    for (index_t k = 0; k < dim.kernel; ++k) {
      const index_t start = dim.base + k * dim.dilation;  // the input of output 0
      const auto lane = [&](index_t position) {
        return std::clamp(ceil_div(position - start, dim.stride), width_.begin, width_.end) -
               width_.begin;
      };
      const PoolTap tap{lane(0), lane(dim.in_extent), k,
                        (start + width_.begin * dim.stride) * in_.strides[4]};
      if (tap.begin < tap.end) width_taps_.push_back(tap);
    }
  }

  // One plane of targets (at.z) for some channels of a sample.
  void run_plane(Position at, index_t channels) const {
    static thread_local Scratch scratch;
    static thread_local std::vector<PoolTap> list;
    const index_t lanes = channels_adjacent_       ? channels
                          : dims_[2].is_adaptive() ? dims_[2].kernel
                                                   : width_.size();
    static_assert(sizeof(T) == sizeof(Number));
    T* const memory = scratch.take<T>(2 * lanes);
    TaskBuffers buffers{channels, memory, reinterpret_cast<Number*>(memory + lanes), list};
    const Taps depth = dims_[0].taps_of(at.z);
    for (at.y = height_.begin; at.y < height_.end; ++at.y) {
      const Taps height = dims_[1].taps_of(at.y);
      at.x = width_.begin;
      if (!channels_adjacent_ && !dims_[2].is_adaptive()) {
        along_width(buffers, at, depth, height);
        continue;
      }
      for (; at.x < width_.end; ++at.x) {
        const Taps width = dims_[2].taps_of(at.x);
        if (channels_adjacent_) {
          along_channels(buffers, at, depth, height, width);
        } else {
          along_window(buffers, at, depth, height, width);
        }
      }
    }
  }

  // The number of a tap in its window, which `taps` stores.
  index_t number(index_t i, index_t j, index_t k) const {
    return (i * dims_[1].kernel + j) * dims_[2].kernel + k;
  }

  // Calls f(number, offset) for the rows of taps of a window, counted from the window's first.
  template <class F>
  void for_rows(const Taps& depth, const Taps& height, const F& f) const {
    const index_t step_z = dims_[0].dilation * in_.strides[2];
    const index_t step_y = dims_[1].dilation * in_.strides[3];
    for (index_t i = depth.begin; i < depth.end; ++i) {
      for (index_t j = height.begin; j < height.end; ++j) {
        f(number(i, j, 0), i * step_z + j * step_y);
      }
    }
  }

  // Whether the list of taps is invalid for a part of a window; it is then empty.
  static bool differs(TaskBuffers& buffers, const Taps& depth, const Taps& height,
                      const Taps& width) {
    const index_t spans[6] = {depth.begin, depth.end,   height.begin,
                              height.end,  width.begin, width.end};
    if (std::equal(spans, spans + 6, buffers.spans)) return false;
    std::copy_n(spans, 6, buffers.spans);
    buffers.list.clear();
    return true;
  }

  // The offset of a window's first input, which may be outside the array.
  index_t origin(const Position& at, const Taps& depth, const Taps& height, index_t x) const {
    return offset(in_, {at.sample, at.channel, depth.first, height.first, x});
  }

  // One target, all channels of the task. Long lists are visited in pieces of kTapsAtOnce, so that
  // the sources of a piece stay in the cache; they are not kept for the next window.
  void along_channels(TaskBuffers& buffers, const Position& at, const Taps& depth,
                      const Taps& height, const Taps& width) const {
    const bool any =
        depth.begin < depth.end && height.begin < height.end && width.begin < width.end;
    const index_t first = number(depth.begin, height.begin, width.begin);
    begin_line(buffers, buffers.channels, any ? static_cast<Number>(first) : kNone);
    Line line = line_of(buffers, origin(at, depth, height, width.first), in_.strides[1]);
    line.lanes = line.step == 1 ? buffers.channels : 0;
    const bool makes = differs(buffers, depth, height, width);
    const bool keeps = depth.end * height.end * width.end <= kTapsAtOnce;
    if (makes) {
      for_rows(depth, height, [&](index_t row, index_t offset) {
        for (index_t k = width.begin; k < width.end; ++k) {
          const index_t step = k * dims_[2].dilation * in_.strides[4];
          buffers.list.push_back({0, buffers.channels, row + k, offset + step});
          if (!keeps && std::ssize(buffers.list) == kTapsAtOnce) {
            scan_taps(buffers, line);
            buffers.list.clear();
          }
        }
      });
    }
    scan_taps(buffers, line);
    if (!keeps) buffers.spans[0] = -1;
    store(buffers, at, buffers.channels, out_.strides[1], taps_.strides[1]);
  }

  // A line of targets, channel by channel. If all values are -inf, torch takes the first tap, so
  // numbers start with it.
  void along_width(TaskBuffers& buffers, Position at, const Taps& depth, const Taps& height) const {
    if (differs(buffers, depth, height, {})) {
      for_rows(depth, height, [&](index_t row, index_t offset) {
        for (const PoolTap& tap : width_taps_) {
          buffers.list.push_back({tap.begin, tap.end, row + tap.number, offset + tap.from});
        }
      });
    }
    const index_t first = number(depth.begin, height.begin, 0);
    for (index_t c = 0; c < buffers.channels; ++c, ++at.channel) {
      begin_line(buffers, width_.size(), kNone);
      if (!buffers.list.empty()) {
        // In reverse order, so that each lane keeps its first tap.
        for (auto tap = width_taps_.rbegin(); tap != width_taps_.rend(); ++tap) {
          std::fill(buffers.numbers + tap->begin, buffers.numbers + tap->end,
                    static_cast<Number>(first + tap->number));
        }
      }
      Line line = line_of(buffers, origin(at, depth, height, 0), dims_[2].stride * in_.strides[4]);
      scan_taps(buffers, line);
      store(buffers, at, width_.size(), out_.strides[4], taps_.strides[4]);
    }
  }

  // One target after the other: lanes are the taps of a row of its window.
  void along_window(TaskBuffers& buffers, Position at, const Taps& depth, const Taps& height,
                    const Taps& width) const {
    const index_t lanes = std::max<index_t>(width.end - width.begin, 0);
    buffers.list.clear();
    for_rows(depth, height, [&](index_t row, index_t offset) {
      buffers.list.push_back({0, lanes, row + width.begin, offset});
    });
    const bool any = lanes > 0 && !buffers.list.empty();
    for (index_t c = 0; c < buffers.channels; ++c, ++at.channel) {
      begin_line(buffers, lanes, any ? static_cast<Number>(buffers.list.front().number) : kNone);
      Line line =
          line_of(buffers, origin(at, depth, height, width.first + width.begin), in_.strides[4]);
      line.lanes = line.step == 1 ? lanes : 0;
      scan_taps(buffers, line);
      Maximum best{-std::numeric_limits<T>::infinity(), kNone};
      for (index_t j = 0; any && j < lanes; ++j) {
        const Maximum lane{buffers.values[j], static_cast<Number>(buffers.numbers[j] + j)};
        if (best.yields_to(lane)) best = lane;
      }
      buffers.values[0] = best.value;
      buffers.numbers[0] = best.tap;
      store(buffers, at, 1, 1, 1);
    }
  }

  Line line_of(const TaskBuffers& buffers, index_t base, index_t step) const {
    return {static_cast<const Storage*>(in_.data),
            base,
            step,
            nullptr,
            0,
            0,
            buffers.values,
            buffers.numbers};
  }

  // Maxima of a line before any tap.
  static void begin_line(const TaskBuffers& buffers, index_t lanes, Number number) {
    std::fill_n(buffers.values, lanes, -std::numeric_limits<T>::infinity());
    std::fill_n(buffers.numbers, lanes, number);
  }

  // Visits the listed taps, and updates maxima and numbers of the line.
  void scan_taps(const TaskBuffers& buffers, Line& line) const {
    line.taps = buffers.list.data();
    line.count = std::ssize(buffers.list);
    maxima_(line);
  }

  // Writes a line, or merges it with the present values.
  void store(const TaskBuffers& buffers, const Position& at, index_t lanes, index_t step,
             index_t tap_step) const {
    Storage* const to = element<Storage>(out_, at);
    Tap* const taps = element<Tap>(taps_, at);
    if (problem_.accumulate) {
      for (index_t j = 0; j < lanes; ++j) {
        const Maximum before{ops::load_as(to[j * step]), taps[j * tap_step]};
        if (!before.yields_to({buffers.values[j], buffers.numbers[j]})) continue;
        to[j * step] = ops::store_as<Storage>(buffers.values[j]);
        taps[j * tap_step] = static_cast<Tap>(buffers.numbers[j]);
      }
      return;
    }
    const auto copy = [&](index_t by, index_t tap_by) {
      for (index_t j = 0; j < lanes; ++j) to[j * by] = ops::store_as<Storage>(buffers.values[j]);
      for (index_t j = 0; j < lanes; ++j) taps[j * tap_by] = static_cast<Tap>(buffers.numbers[j]);
    };
    if (step == 1 && tap_step == 1) {
      copy(1, 1);
    } else {
      copy(step, tap_step);
    }
  }

  const MaxProblem& problem_;
  const SpatialArray &in_, &out_, &taps_;
  const PoolDim (&dims_)[ops::kSpatialDims];
  const Span depth_, height_, width_;  // of targets
  const bool channels_adjacent_;       // lanes are channels
  const index_t channel_step_;         // of a task
  const PoolMaxima<Storage, T, Number> maxima_;
  std::vector<PoolTap> width_taps_;
};

// Calls f with the types of the values and of the taps.
template <class F>
void dispatch(const MaxProblem& problem, const F& f) {
  ops::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage> values) {
    if (problem.tap_dtype == DType::kUInt8) {
      f(values, std::type_identity<std::uint8_t>{});
    } else {
      f(values, std::type_identity<std::int32_t>{});
    }
  });
}

}  // namespace

void pool_max_forward(const MaxProblem& problem) {
  dispatch(problem,
           [&]<class Storage, class Tap>(std::type_identity<Storage>, std::type_identity<Tap>) {
             MaxPooler<Storage, Tap>(problem).run();
           });
}

void pool_max_backward(const MaxProblem& problem) {
  dispatch(problem,
           [&]<class Storage, class Tap>(std::type_identity<Storage>, std::type_identity<Tap>) {
             MaxSpreader<Storage, Tap>(problem).run();
           });
}

void pool_max_pick(const MaxProblem& problem) {
  dispatch(problem,
           [&]<class Storage, class Tap>(std::type_identity<Storage>, std::type_identity<Tap>) {
             const auto body = ops::MaxBody<MaxOp::kPick, Storage, Tap, 1>::make(problem);
             launch::run_on_cpu(
                 body, body.rows() * body.run_length() * static_cast<index_t>(sizeof(Storage)));
           });
}

}  // namespace pydist::cpu
