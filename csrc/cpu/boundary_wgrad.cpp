// wgrad: inner-product tiles over the padded planes of conv_lowering.hpp.
//
// weight_grad[co, ci, tap] += sum_q out_grad[co, q] * in[ci, offset(tap) + q]. Each weight belongs to
// one task, which adds samples, planes and chunks of positions in a fixed order: the result does not
// depend on the number of threads.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu/boundary_conv.hpp"
#include "cpu/conv_lowering.hpp"
#include "cpu/conv_support.hpp"
#include "cpu/isa.hpp"
#include "cpu/scratch.hpp"
#include "kernels/dispatch.hpp"
#include "launch/thread_pool.hpp"

namespace pydist::cpu {
namespace {

using kernels::ConvProblem;

constexpr index_t kChunk = 4096;       // positions: tiles of 16 + 3 rows stay in the L2 cache
constexpr index_t kTaskOutputs = 16;   // output channels of a task
constexpr index_t kMaxTile = 24;
constexpr index_t kWorkspaceBytes = 8 << 20;
constexpr index_t kFlopsPerThread = 4'000'000;

template <class Storage>
class WeightGradient {
  using T = kernels::accumulator_t<Storage>;
  // fp16 and bf16 gradients are summed in fp32 and rounded once.
  static constexpr bool kWidened = !std::is_same_v<T, Storage>;

 public:
  explicit WeightGradient(const ConvProblem& problem)
      : problem_(kWidened ? with_contiguous_weight(problem) : problem),
        given_(problem),
        lowering_(lower(problem_, ConvRole::kForward)),
        isa_(conv_isa<T>()) {}

  void run() {
    if (lowering_.empty() || problem_.in_channels == 0 || problem_.out_channels == 0) return;
    place_gradient_rows();
    const index_t in = problem_.groups * problem_.in_channels * lowering_.channel;
    const index_t out = problem_.groups * problem_.out_channels * gradient_channel_;
    const index_t together = std::clamp<index_t>(
        kWorkspaceBytes / ((in + out) * static_cast<index_t>(sizeof(T))), 1, problem_.batch);
    const index_t weights = kWidened ? weight_elements(problem_) : 0;
    static thread_local Scratch scratch;
    T* const memory = scratch.take<T>(weights + together * (in + out) + kSlack);
    weight_ = static_cast<T*>(given_.weight.data);
    if constexpr (kWidened) {
      std::fill_n(memory, weights, T{});
      weight_ = memory;
    }
    gradient_ = memory + weights;
    source_ = gradient_ + together * out;
    std::fill_n(source_ + together * in, kSlack, T{});  // read past the last plane, times zero
    for (index_t first = 0; first < problem_.batch; first += together) {
      run_samples(first, std::min(together, problem_.batch - first));
    }
    if constexpr (kWidened) add_widened();
  }

 private:
  // One channel of the gradient holds a row of positions for each plane, a whole number of vectors.
  void place_gradient_rows() {
    for (const PlaneJob& job : lowering_.jobs) {
      gradient_row_.push_back(gradient_channel_);
      gradient_channel_ += round_up(job.positions(lowering_.pitch));
    }
  }

  index_t round_up(index_t positions) const {
    return ceil_div(positions, isa_.lanes) * isa_.lanes;
  }

  void add_widened() const {
    auto* const values = static_cast<Storage*>(given_.weight.data);
    visit_weight(problem_, given_.weight.strides, [&](index_t i, index_t offset) {
      values[offset] =
          kernels::store_as<Storage>(kernels::load_as(values[offset]) + weight_[i]);
    });
  }

  void run_samples(index_t first, index_t samples) {
    const index_t ins = problem_.groups * problem_.in_channels;
    launch::parallel_for(
        samples * ins, std::max<index_t>(1, 65536 / lowering_.channel), [&](index_t i) {
          const auto* const source = static_cast<const Storage*>(problem_.in.data) +
                                     (first + i / ins) * problem_.in.strides[0] +
                                     i % ins * problem_.in.strides[1];
          fill_channel(lowering_, problem_, ConvRole::kForward, source,
                       source_ + i * lowering_.channel);
        });
    const index_t outs = problem_.groups * problem_.out_channels;
    launch::parallel_for(
        samples * outs, std::max<index_t>(1, 65536 / gradient_channel_), [&](index_t i) {
          fill_gradient(static_cast<const Storage*>(problem_.out.data) +
                            (first + i / outs) * problem_.out.strides[0] +
                            i % outs * problem_.out.strides[1],
                        gradient_ + i * gradient_channel_);
        });
    const auto taps = static_cast<index_t>(lowering_.jobs.front().source_offset.size());
    const index_t block = std::max<index_t>(1, 2 * isa_.dot_columns / taps);  // input channels
    const index_t in_blocks = ceil_div(problem_.in_channels, block);
    const index_t out_blocks = ceil_div(problem_.out_channels, kTaskOutputs);
    const index_t flops =
        2 * samples * std::min(kTaskOutputs, problem_.out_channels) * block * taps *
        gradient_channel_;
    launch::parallel_for(problem_.groups * in_blocks * out_blocks,
                         std::max<index_t>(1, kFlopsPerThread / flops), [&](index_t i) {
                           const index_t group = i / (in_blocks * out_blocks);
                           const index_t in = i / out_blocks % in_blocks * block;
                           run_task(samples, group, in, std::min(in + block, problem_.in_channels),
                                    i % out_blocks * kTaskOutputs);
                         });
  }

  // The planes of one channel of the gradient, with zeros in the rows' padding.
  void fill_gradient(const Storage* channel, T* rows) const {
    for (std::size_t j = 0; j < lowering_.jobs.size(); ++j) {
      const PlaneJob& job = lowering_.jobs[j];
      T* to = rows + gradient_row_[j];
      T* const end = to + round_up(job.positions(lowering_.pitch));
      for (index_t y = 0; y < job.rows; ++y) {
        const Storage* const from = channel + job.destination + y * job.row_stride;
        for (index_t x = 0; x < job.columns; ++x) to[x] = kernels::load_as(from[x * job.stride]);
        T* const next = y + 1 < job.rows ? to + lowering_.pitch : end;
        std::fill(to + job.columns, next, T{});
        to = next;
      }
    }
  }

  // Weights of the input channels [in, in_end) and kTaskOutputs output channels of a group.
  void run_task(index_t samples, index_t group, index_t in, index_t in_end, index_t out) const {
    const index_t out_end = std::min(out + kTaskOutputs, problem_.out_channels);
    const index_t first_in = group * problem_.in_channels;
    const index_t first_out = group * problem_.out_channels;
    for (index_t sample = 0; sample < samples; ++sample) {
      const T* const source =
          source_ + (sample * problem_.groups * problem_.in_channels + first_in) * lowering_.channel;
      const T* const gradient =
          gradient_ +
          (sample * problem_.groups * problem_.out_channels + first_out) * gradient_channel_;
      for (std::size_t j = 0; j < lowering_.jobs.size(); ++j) {
        const index_t positions = round_up(lowering_.jobs[j].positions(lowering_.pitch));
        for (index_t q = 0; q < positions; q += kChunk) {
          add_chunk(lowering_.jobs[j], source + q, in, in_end, gradient + gradient_row_[j] + q, out,
                    out_end, std::min(kChunk, positions - q),
                    weight_ + first_out * problem_.weight.strides[0]);
        }
      }
    }
  }

  void add_chunk(const PlaneJob& job, const T* source, index_t in, index_t in_end,
                 const T* gradient, index_t out, index_t out_end, index_t positions,
                 T* weight) const {
    const auto taps = static_cast<index_t>(job.source_offset.size());
    const T* rows[kMaxTile];
    index_t places[kMaxTile];
    T sums[kMaxTile];
    DotTile<T> tile{};
    tile.right = rows;
    tile.left_row = gradient_channel_;
    tile.vectors = positions / isa_.lanes;
    tile.sums = sums;
    for (index_t r = in * taps; r < in_end * taps;) {
      index_t columns = 0;
      for (; columns < isa_.dot_columns && r < in_end * taps; ++columns, ++r) {
        const auto tap = static_cast<std::size_t>(r % taps);
        rows[columns] = source + r / taps * lowering_.channel + job.source_offset[tap];
        places[columns] = r / taps * problem_.weight.strides[1] + job.weight_offset[tap];
      }
      for (index_t m = out; m < out_end; m += isa_.dot_rows) {
        const index_t height = std::min<index_t>(isa_.dot_rows, out_end - m);
        tile.left = gradient + m * gradient_channel_;
        isa_.dot[height - 1][columns - 1](tile);
        for (index_t i = 0; i < height; ++i) {
          for (index_t c = 0; c < columns; ++c) {
            weight[(m + i) * problem_.weight.strides[0] + places[c]] += sums[i * columns + c];
          }
        }
      }
    }
  }

  static constexpr index_t kSlack = 64;

  const ConvProblem problem_;
  const ConvProblem& given_;
  const ConvLowering lowering_;
  const ConvIsa<T>& isa_;
  std::vector<index_t> gradient_row_;  // by job, within a channel
  index_t gradient_channel_ = 0;
  T* weight_ = nullptr;
  T* gradient_ = nullptr;
  T* source_ = nullptr;
};

}  // namespace

void boundary_conv_wgrad(const ConvProblem& problem) {
  kernels::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
    WeightGradient<Storage>(problem).run();
  });
}

}  // namespace pydist::cpu
