// Boundary convolution on the CPU, forward and dgrad: outer-product tiles over the padded planes of
// cpu_lowering.hpp.
//
// Not the shared body (tile_body.hpp), which gathers each operand by its indices: that costs more
// than the product. Here a padded copy of the slab makes every operand a constant offset, so that
// full vectors are multiplied (isa_tiles.cpp). Measured on one thread with AVX-512, float, kernel
// 3, slabs of one plane (4 -> 16 channels on 128 x 128, 16 -> 32 on 64 x 64, 64 -> 128 on 32 x 32),
// the shared body takes 21 to 58 times as long forward and 31 to 163 times for dgrad.
// Traffic: the slab once, into a workspace of 8 MB or one sample; then one read and one write per
// output that the slab reaches.
// Proof: tests/native/test_conv.cpp against plain loops, tests/kernels/test_boundary_conv.py.
#include <algorithm>
#include <type_traits>

#include "launch/scratch.hpp"
#include "launch/thread_pool.hpp"
#include "ops/common/dispatch.hpp"
#include "ops/conv/cpu_lowering.hpp"
#include "ops/conv/cpu_support.hpp"
#include "ops/conv/isa_tables.hpp"
#include "ops/conv/kernels.hpp"

namespace pydist::cpu {
namespace {

using ops::ConvProblem;
using ops::SpatialArray;

constexpr index_t kMaxRows = 8;        // of a tile
constexpr index_t kMaxPositions = 48;  // of a tile: three AVX-512 vectors of floats
constexpr index_t kTilesPerTask = 16;
constexpr index_t kWorkspaceBytes = 8 << 20;  // samples are taken together up to this size
constexpr index_t kFlopsPerThread = 4'000'000;

// One call. `Storage` is the type of the arrays, `T` the type of products and sums.
template <class Storage>
class Convolver {
  using T = ops::accumulator_t<Storage>;
  // fp16 and bf16 weights are widened once, into a contiguous array.
  static constexpr bool kWidened = !std::is_same_v<T, Storage>;

 public:
  Convolver(const ConvProblem& problem, ConvRole role)
      : problem_(kWidened ? with_contiguous_weight(problem) : problem),
        given_weight_(problem.weight),
        role_(role),
        lowering_(lower(problem_, role)),
        isa_(conv_isa<T>()),
        source_(role == ConvRole::kForward ? problem.in : problem.out),
        destination_(role == ConvRole::kForward ? problem.out : problem.in) {
    const bool forward = role == ConvRole::kForward;
    sources_ = forward ? problem.in_channels : problem.out_channels;
    destinations_ = forward ? problem.out_channels : problem.in_channels;
    weight_row_ = problem_.weight.strides[forward ? 0 : 1];
    weight_channel_ = problem_.weight.strides[forward ? 1 : 0];
  }

  // Samples are taken together as far as the workspace allows: more of them for the threads.
  void run() {
    if (lowering_.empty() || sources_ == 0 || destinations_ == 0) return;
    const index_t sample = problem_.groups * sources_ * lowering_.channel;
    const index_t together = std::clamp<index_t>(
        kWorkspaceBytes / (sample * static_cast<index_t>(sizeof(T))), 1, problem_.batch);
    const index_t weights = kWidened ? weight_elements(problem_) : 0;
    static thread_local Scratch scratch;
    T* const memory = scratch.take<T>(weights + together * sample + kMaxPositions);
    weight_ = static_cast<const T*>(given_weight_.data);
    if constexpr (kWidened) {
      visit_weight(problem_, given_weight_.strides, [&](index_t i, index_t offset) {
        memory[i] = ops::load_as(static_cast<const Storage*>(given_weight_.data)[offset]);
      });
      weight_ = memory;
    }
    workspace_ = memory + weights;
    std::fill_n(workspace_ + together * sample, kMaxPositions, T{});  // reads past the last plane
    for (index_t first = 0; first < problem_.batch; first += together) {
      run_samples(first, std::min(together, problem_.batch - first));
    }
  }

 private:
  // Two parallel loops: channels into the workspace, then tasks.
  void run_samples(index_t first, index_t samples) {
    const index_t channels = problem_.groups * sources_;
    launch::parallel_for(
        samples * channels, std::max<index_t>(1, 65536 / lowering_.channel), [&](index_t i) {
          const auto* const source = static_cast<const Storage*>(source_.data) +
                                     (first + i / channels) * source_.strides[0] +
                                     i % channels * source_.strides[1];
          fill_channel(lowering_, problem_, role_, source, workspace_ + i * lowering_.channel);
        });
    // A task is a piece of the positions of a plane times a few rows (destination channels). Rows
    // vary fastest, so that the sources of the positions stay in the cache.
    const index_t row_blocks = ceil_div(destinations_, kMaxRows);
    for (const PlaneJob& job : lowering_.jobs) {
      const index_t positions = job.positions(lowering_.pitch);
      const index_t step = kTilesPerTask * isa_.conv_vectors * isa_.lanes;
      const index_t steps = ceil_div(positions, step);
      const index_t planes = samples * problem_.groups;
      const index_t flops = 2 * std::min(kMaxRows, destinations_) * std::min(step, positions) *
                            sources_ * static_cast<index_t>(job.source_offset.size());
      launch::parallel_for(planes * steps * row_blocks,
                           std::max<index_t>(1, kFlopsPerThread / flops), [&](index_t i) {
                             const index_t rest = i / row_blocks;
                             run_task(job, first, rest / steps, rest % steps * step,
                                      std::min(positions, (rest % steps + 1) * step),
                                      i % row_blocks * kMaxRows);
                           });
    }
  }

  // Positions [begin, end) of up to kMaxRows destination channels, from `row` on, in plane `plane`
  // = (sample, group): tiles of rows x positions, each of which sums over all channels and taps.
  void run_task(const PlaneJob& job, index_t first, index_t plane, index_t begin, index_t end,
                index_t row) const {
    const index_t group = plane % problem_.groups;
    const index_t last_row = std::min(row + kMaxRows, destinations_);
    Storage* const destination = static_cast<Storage*>(destination_.data) +
                                 (first + plane / problem_.groups) * destination_.strides[0] +
                                 group * destinations_ * destination_.strides[1] + job.destination;
    alignas(64) T sums[kMaxRows * kMaxPositions];
    ConvTile<T> tile{};
    tile.src_channel = lowering_.channel;
    tile.weight_channel = weight_channel_;
    tile.weight_row = weight_row_;
    tile.source_offset = job.source_offset.data();
    tile.weight_offset = job.weight_offset.data();
    tile.taps = static_cast<index_t>(job.source_offset.size());
    tile.channels = sources_;
    tile.sums = sums;
    const T* const group_weight =
        weight_ + group * problem_.out_channels * problem_.weight.strides[0];
    for (index_t q = begin; q < end; q += isa_.conv_vectors * isa_.lanes) {
      const index_t vectors = std::min<index_t>(isa_.conv_vectors, ceil_div(end - q, isa_.lanes));
      const index_t count = std::min(vectors * isa_.lanes, end - q);
      tile.src = workspace_ + plane * sources_ * lowering_.channel + q;
      for (index_t m = row; m < last_row;) {
        const int log_rows = conv_rows(isa_, last_row - m);
        tile.weight = group_weight + m * weight_row_;
        isa_.conv[log_rows][vectors - 1](tile);
        for (index_t end_m = m + (1 << log_rows), i = 0; m < end_m; ++m, ++i) {
          add(job, destination + m * destination_.strides[1], q, count,
              sums + i * vectors * isa_.lanes);
        }
      }
    }
  }

  // destination += sums of the positions [q, q + count), without those in the padding of rows.
  void add(const PlaneJob& job, Storage* destination, index_t q, index_t count,
           const T* sums) const {
    index_t y = q / lowering_.pitch, x = q % lowering_.pitch;
    for (index_t done = 0; done < count; x = 0, ++y) {
      const index_t length = std::min(count - done, lowering_.pitch - x);
      const index_t valid = std::min(length, job.columns - x);
      Storage* const to = destination + y * job.row_stride + x * job.stride;
      if (job.stride == 1) {
        for (index_t j = 0; j < valid; ++j) accumulate(to[j], sums[done + j]);
      } else {
        for (index_t j = 0; j < valid; ++j) accumulate(to[j * job.stride], sums[done + j]);
      }
      done += length;
    }
  }

  static void accumulate(Storage& element, T sum) {
    element = ops::store_as<Storage>(ops::load_as(element) + sum);
  }

  const ConvProblem problem_;
  const SpatialArray& given_weight_;
  const ConvRole role_;
  const ConvLowering lowering_;
  const ConvIsa<T>& isa_;
  const SpatialArray& source_;
  const SpatialArray& destination_;
  index_t sources_, destinations_;  // channels of a group
  index_t weight_row_, weight_channel_;
  const T* weight_ = nullptr;
  T* workspace_ = nullptr;
};

void convolve(const ConvProblem& problem, ConvRole role) {
  ops::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
    Convolver<Storage>(problem, role).run();
  });
}

}  // namespace

void boundary_conv_forward(const ConvProblem& problem) { convolve(problem, ConvRole::kForward); }

void boundary_conv_dgrad(const ConvProblem& problem) { convolve(problem, ConvRole::kDgrad); }

}  // namespace pydist::cpu
