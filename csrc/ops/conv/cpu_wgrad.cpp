// Boundary convolution on the CPU, wgrad, over the padded planes of cpu_lowering.hpp:
//   weight_grad[co, ci, tap] += sum_q out_grad[co, q] * in[ci, offset(tap) + q].
//
// Three forms of the sum, by shape:
//
//   form    lanes of a vector   used for
//   rows    output channels     channels-last float or double, one group, rows of 8 or more, Co a
//                               multiple of the lanes, sums of 256 KB or less: reads the arrays in
//                               place (cpu_wgrad_rows.cpp)
//   outer   output channels     planes below 512 positions with Co > 1; larger ones with
//                               Co >= lanes and Ci >= 8
//   inner   positions q         the others: large planes with few channels
//
// Inner products add up across lanes at the end. Outer products never do, so their planes may be
// tiny, but they need the gradient transposed to [q][co]. In each form every weight belongs to one
// task, which adds samples, planes and chunks of positions in a fixed order: the result does not
// depend on threads.
//
// Not the shared body (tile_body.hpp), for the reason given in cpu_planes.cpp: measured as there,
// the shared body takes 19 to 75 times as long.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "launch/scratch.hpp"
#include "launch/thread_pool.hpp"
#include "ops/common/dispatch.hpp"
#include "ops/conv/cpu_lowering.hpp"
#include "ops/conv/cpu_support.hpp"
#include "ops/conv/cpu_wgrad_rows.hpp"
#include "ops/conv/isa_tables.hpp"
#include "ops/conv/kernels.hpp"

namespace pydist::cpu {
namespace {

using ops::ConvProblem;

constexpr index_t kDotChunk = 4096;   // positions: tiles of 16 + 3 rows stay in the L2 cache
constexpr index_t kDotOutputs = 16;   // output channels of a task
constexpr index_t kOuterChunk = 512;  // positions, each with up to three vectors of channels
constexpr index_t kOuterInputs = 8;   // input channels of a task
constexpr index_t kMaxTile = 24;      // sums of one call of dot
constexpr index_t kSmallPlane = 512;  // positions below which sums across lanes dominate
constexpr index_t kSlack = 64;        // elements that tiles may read past the end
constexpr index_t kWorkspaceBytes = 8 << 20;
constexpr index_t kFlopsPerThread = 4'000'000;

// One call of the outer or the inner form.
template <class Storage>
class WeightGradient {
  using T = ops::accumulator_t<Storage>;

 public:
  explicit WeightGradient(const ConvProblem& problem)
      : problem_(problem),
        // With a contiguous weight, weight offsets are C-order numbers of kernel indices.
        lowering_(lower(with_contiguous_weight(problem), ConvRole::kForward)),
        isa_(conv_isa<T>()),
        ins_(problem.groups * problem.in_channels),
        outs_(problem.groups * problem.out_channels) {}

  void run() {
    if (lowering_.empty() || problem_.in_channels == 0 || problem_.out_channels == 0) return;
    const PlaneJob& job = lowering_.jobs.front();
    outer_ = job.rows * job.columns < kSmallPlane
                 ? problem_.out_channels > 1
                 : problem_.out_channels >= isa_.lanes && problem_.in_channels >= kOuterInputs;
    collect_taps();
    place_planes();
    const index_t sample = ins_ * lowering_.channel + outs_ * plane_end_;
    const index_t together = std::clamp<index_t>(
        kWorkspaceBytes / (sample * static_cast<index_t>(sizeof(T))), 1, problem_.batch);
    static thread_local Scratch scratch;
    source_ = scratch.take<T>(together * sample + 2 * kSlack);
    gradient_ = source_ + together * ins_ * lowering_.channel + kSlack;
    std::fill_n(gradient_ - kSlack, kSlack, T{});
    std::fill_n(gradient_ + together * outs_ * plane_end_, kSlack, T{});
    for (index_t first = 0; first < problem_.batch; first += together) {
      samples_ = std::min(together, problem_.batch - first);
      fill(first);
      run_tasks();
    }
  }

 private:
  // A range of input channels times a range of output channels, of one group.
  struct Task {
    index_t group, in, in_end, out, out_end;
  };

  // The kernel indices that the slab meets, and their offsets in the given weight.
  void collect_taps() {
    for (const PlaneJob& job : lowering_.jobs) {
      taps_.insert(taps_.end(), job.weight_offset.begin(), job.weight_offset.end());
    }
    std::ranges::sort(taps_);
    taps_.erase(std::ranges::unique(taps_).begin(), taps_.end());
    const index_t rows = problem_.dims[1].kernel, columns = problem_.dims[2].kernel;
    kernel_ = problem_.dims[0].kernel * rows * columns;
    const index_t* const strides = problem_.weight.strides + 2;
    for (const index_t tap : taps_) {
      places_.push_back(tap / columns / rows * strides[0] + tap / columns % rows * strides[1] +
                        tap % columns * strides[2]);
    }
  }

  // Offsets of the gradient's planes in the workspace of a sample, which is [plane][q][co] for
  // outer products and [co][plane][q] for inner ones, where q has the pitch of the source.
  void place_planes() {
    for (const PlaneJob& job : lowering_.jobs) {
      plane_begin_.push_back(plane_end_);
      plane_end_ += outer_ ? job.rows * job.columns : padded_positions(job);
    }
  }

  index_t padded_positions(const PlaneJob& job) const {
    return ceil_div(job.positions(lowering_.pitch), isa_.lanes) * isa_.lanes;
  }

  // Copies both arrays of some samples into the workspace: the source padded, the gradient by
  // plane.
  void fill(index_t first) {
    launch::parallel_for(
        samples_ * ins_, std::max<index_t>(1, 65536 / lowering_.channel), [&](index_t i) {
          const auto* const channel = static_cast<const Storage*>(problem_.in.data) +
                                      (first + i / ins_) * problem_.in.strides[0] +
                                      i % ins_ * problem_.in.strides[1];
          fill_channel(lowering_, problem_, ConvRole::kForward, channel,
                       source_ + i * lowering_.channel);
        });
    launch::parallel_for(
        samples_ * outs_, std::max<index_t>(1, 65536 / plane_end_), [&](index_t i) {
          const index_t sample = i / outs_, co = i % outs_;
          const auto* const channel = static_cast<const Storage*>(problem_.out.data) +
                                      (first + sample) * problem_.out.strides[0] +
                                      co * problem_.out.strides[1];
          T* const planes = gradient_ + sample * outs_ * plane_end_;
          for (std::size_t j = 0; j < lowering_.jobs.size(); ++j) {
            if (outer_) {
              transpose_plane(lowering_.jobs[j], channel, planes + plane_begin_[j] * outs_ + co);
            } else {
              pad_plane(lowering_.jobs[j], channel, planes + co * plane_end_ + plane_begin_[j]);
            }
          }
        });
  }

  // Outer products: positions without padding, output channels adjacent.
  void transpose_plane(const PlaneJob& job, const Storage* channel, T* to) const {
    for (index_t y = 0; y < job.rows; ++y) {
      const Storage* const from = channel + job.destination + y * job.row_stride;
      for (index_t x = 0; x < job.columns; ++x, to += outs_) {
        *to = ops::load_as(from[x * job.stride]);
      }
    }
  }

  // Inner products: zeros in the padding of rows, so that the source's values there do not count.
  void pad_plane(const PlaneJob& job, const Storage* channel, T* to) const {
    T* const end = to + padded_positions(job);
    for (index_t y = 0; y < job.rows; ++y) {
      const Storage* const from = channel + job.destination + y * job.row_stride;
      for (index_t x = 0; x < job.columns; ++x) to[x] = ops::load_as(from[x * job.stride]);
      T* const next = y + 1 < job.rows ? to + lowering_.pitch : end;
      std::fill(to + job.columns, next, T{});
      to = next;
    }
  }

  void run_tasks() const {
    const auto taps = static_cast<index_t>(taps_.size());
    const index_t in_step =
        outer_ ? kOuterInputs : std::max<index_t>(1, 2 * isa_.dot_columns / taps);
    const index_t out_step = outer_ ? isa_.conv_vectors * isa_.lanes : kDotOutputs;
    const index_t in_steps = ceil_div(problem_.in_channels, in_step);
    const index_t out_steps = ceil_div(problem_.out_channels, out_step);
    const index_t flops = 2 * samples_ * std::min(out_step, problem_.out_channels) *
                          std::min(in_step, problem_.in_channels) * taps * plane_end_;
    launch::parallel_for(
        problem_.groups * in_steps * out_steps, std::max<index_t>(1, kFlopsPerThread / flops),
        [&](index_t i) {
          const index_t in = i / out_steps % in_steps * in_step, out = i % out_steps * out_step;
          run_task({i / (in_steps * out_steps), in, std::min(in + in_step, problem_.in_channels),
                    out, std::min(out + out_step, problem_.out_channels)});
        });
  }

  // Sums of a task are [input channel][kernel index][output channel] until all samples are added.
  void run_task(const Task& task) const {
    static thread_local Scratch scratch;
    const index_t width = task.out_end - task.out;
    const index_t count = (task.in_end - task.in) * kernel_ * width;
    T* const sums = scratch.take<T>(count);
    std::fill_n(sums, count, T{});
    for (index_t sample = 0; sample < samples_; ++sample) {
      const T* const source =
          source_ +
          (sample * ins_ + task.group * problem_.in_channels + task.in) * lowering_.channel;
      const T* const planes = gradient_ + sample * outs_ * plane_end_;
      const index_t co = task.group * problem_.out_channels + task.out;
      for (std::size_t j = 0; j < lowering_.jobs.size(); ++j) {
        if (outer_) {
          add_outer(task, lowering_.jobs[j], source, planes + plane_begin_[j] * outs_ + co, sums);
        } else {
          add_inner(task, lowering_.jobs[j], source, planes + co * plane_end_ + plane_begin_[j],
                    sums);
        }
      }
    }
    add_to_weight(task, sums);
  }

  // Chunks of rows: for each tap, a tile of (input channels) x (output channels), which sums over
  // the positions of the chunk: positions are the tile's channels and taps.
  void add_outer(const Task& task, const PlaneJob& job, const T* source, const T* gradient,
                 T* sums) const {
    const index_t width = task.out_end - task.out;
    const index_t vectors = ceil_div(width, isa_.lanes);
    std::vector<index_t> along(static_cast<std::size_t>(job.columns));
    std::vector<index_t> across(along.size());
    for (index_t x = 0; x < job.columns; ++x) {
      along[static_cast<std::size_t>(x)] = x;
      across[static_cast<std::size_t>(x)] = x * outs_;
    }
    alignas(64) T products[kOuterInputs * kSlack];
    ConvTile<T> tile{};
    tile.src_channel = job.columns * outs_;
    tile.weight_channel = lowering_.pitch;
    tile.weight_row = lowering_.channel;
    tile.source_offset = across.data();
    tile.weight_offset = along.data();
    tile.taps = job.columns;
    tile.sums = products;
    const index_t chunk = std::max<index_t>(1, kOuterChunk / job.columns);  // rows
    for (index_t y = 0; y < job.rows; y += chunk) {
      tile.channels = std::min(chunk, job.rows - y);
      tile.src = gradient + y * job.columns * outs_;
      for (std::size_t t = 0; t < job.source_offset.size(); ++t) {
        for (index_t in = task.in; in < task.in_end;) {
          const int log_rows = conv_rows(isa_, task.in_end - in);
          tile.weight = source + (in - task.in) * lowering_.channel + job.source_offset[t] +
                        y * lowering_.pitch;
          isa_.conv[log_rows][vectors - 1](tile);
          for (index_t i = 0; i < 1 << log_rows; ++i, ++in) {
            T* const to = sums + ((in - task.in) * kernel_ + job.weight_offset[t]) * width;
            for (index_t x = 0; x < width; ++x) to[x] += products[i * vectors * isa_.lanes + x];
          }
        }
      }
    }
  }

  // Chunks of positions: tiles of (output channels) x (pairs of an input channel and a tap), which
  // sum over the positions of the chunk in their lanes.
  void add_inner(const Task& task, const PlaneJob& job, const T* source, const T* gradient,
                 T* sums) const {
    const index_t width = task.out_end - task.out;
    const auto taps = static_cast<index_t>(job.source_offset.size());
    const index_t positions = padded_positions(job);
    const T* right[kMaxTile];
    T* to[kMaxTile];
    T products[kMaxTile];
    DotTile<T> tile{};
    tile.right = right;
    tile.left_row = plane_end_;
    tile.sums = products;
    for (index_t q = 0; q < positions; q += kDotChunk) {
      tile.vectors = std::min(kDotChunk, positions - q) / isa_.lanes;
      for (index_t r = 0; r < (task.in_end - task.in) * taps;) {
        index_t columns = 0;
        for (; columns < isa_.dot_columns && r < (task.in_end - task.in) * taps; ++columns, ++r) {
          const auto tap = static_cast<std::size_t>(r % taps);
          right[columns] = source + r / taps * lowering_.channel + job.source_offset[tap] + q;
          to[columns] = sums + (r / taps * kernel_ + job.weight_offset[tap]) * width;
        }
        for (index_t m = 0; m < width; m += isa_.dot_rows) {
          const index_t rows = std::min<index_t>(isa_.dot_rows, width - m);
          tile.left = gradient + m * plane_end_ + q;
          isa_.dot[rows - 1][columns - 1](tile);
          for (index_t i = 0; i < rows; ++i) {
            for (index_t c = 0; c < columns; ++c) to[c][m + i] += products[i * columns + c];
          }
        }
      }
    }
  }

  // Rounds once per weight and batch of samples.
  void add_to_weight(const Task& task, const T* sums) const {
    const index_t width = task.out_end - task.out;
    const index_t* const strides = problem_.weight.strides;
    for (index_t co = 0; co < width; ++co) {
      for (index_t ci = 0; ci < task.in_end - task.in; ++ci) {
        Storage* const kernel = static_cast<Storage*>(problem_.weight.data) +
                                (task.group * problem_.out_channels + task.out + co) * strides[0] +
                                (task.in + ci) * strides[1];
        const T* const sum = sums + ci * kernel_ * width + co;
        for (std::size_t t = 0; t < taps_.size(); ++t) {
          Storage& weight = kernel[places_[t]];
          weight = ops::store_as<Storage>(ops::load_as(weight) + sum[taps_[t] * width]);
        }
      }
    }
  }

  const ConvProblem& problem_;
  const ConvLowering lowering_;
  const ConvIsa<T>& isa_;
  const index_t ins_, outs_;     // channels of all groups
  index_t kernel_ = 1;           // kernel indices of one channel pair
  std::vector<index_t> taps_;    // kernel indices that the slab meets
  std::vector<index_t> places_;  // their offsets in a kernel of the given weight
  bool outer_ = false;
  std::vector<index_t> plane_begin_;
  index_t plane_end_ = 0;
  index_t samples_ = 0;  // in the workspace
  T* source_ = nullptr;
  T* gradient_ = nullptr;
};

}  // namespace

void boundary_conv_wgrad(const ConvProblem& problem) {
  if (add_wgrad_by_rows(problem)) return;
  ops::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
    WeightGradient<Storage>(problem).run();
  });
}

}  // namespace pydist::cpu
