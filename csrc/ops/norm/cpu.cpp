// Norms on the CPU.
//
// The passes over the elements are not the shared bodies, in which each thread visits positions
// with a stride, which suits the lanes of a warp. Here memory is walked in order, in blocks that
// stay in the L1 cache, by loops that are compiled per instruction set (isa_passes.cpp). Measured
// on one thread with AVX-512, float, 16 channels of 64^3 and 64 of 32^3: for sums the shared bodies
// take 6 to 46 times as long; for writes 3.3 to 6.8 times channels-last, and about as long else
// (0.8 to 1.8). The computations per row between the passes are the shared bodies of rows_body.hpp.
// Proof: tests/native/test_norm.cpp against plain loops.
#include "launch/cpu.hpp"

#include <algorithm>
#include <type_traits>

#include "isa/isa.hpp"
#include "ops/common/dispatch.hpp"
#include "ops/norm/cpu_lines.hpp"
#include "ops/norm/isa_tables.hpp"
#include "ops/norm/kernels.hpp"

namespace pydist::cpu {
namespace {

using ops::BFloat16;
using ops::Float16;
using ops::NormProblem;
using ops::RowMoments;

template <class Storage>
const auto& isa_of() {
  const NormTable& table = isa::chosen(PYDIST_ISA_TABLES(kNorm));
  if constexpr (std::is_same_v<Storage, Float16>) return table.f16;
  if constexpr (std::is_same_v<Storage, BFloat16>) return table.bf16;
  if constexpr (std::is_same_v<Storage, float>) return table.f32;
  if constexpr (std::is_same_v<Storage, double>) return table.f64;
}

// One call: the four passes over the elements, in terms of the lines and blocks of cpu_lines.hpp.
template <class Storage>
class Normalizer {
  using Lines = NormLines<Storage>;
  using T = typename Lines::T;
  using Block = typename Lines::Block;
  using TaskBuffers = typename Lines::TaskBuffers;

 public:
  explicit Normalizer(const NormProblem& problem)
      : problem_(problem),
        isa_(isa_of<Storage>()),
        lines_(problem, isa_),
        activation_(static_cast<int>(problem.activation())) {}

  void moments() const {
    lines_.for_parts([&](index_t group, index_t part, const TaskBuffers& buffers) {
      moments_of(group, part, buffers);
    });
    merge<true>();
  }

  // Sums of a block are formed in T by the inner loop, then added to the part's sums in double
  // (fold).
  void grad_sums() const {
    const index_t rows = problem_.shape.rows();
    lines_.for_parts([&](index_t group, index_t part, const TaskBuffers& buffers) {
      double* const sums = part_sums(group, part);
      const int count = problem_.learned ? 3 : 2;
      for (int i = 0; i < count; ++i) std::fill_n(sums + i * rows, lines_.width(), 0.0);
      lines_.spread_values(lines_.first_row(group), buffers);
      lines_.for_blocks(group, part, buffers, [&](const Block& block) {
        isa_.sums[activation_](block);
        lines_.fold(block, block.first, sums);
        lines_.fold(block, block.second, sums + rows);
        if (problem_.learned) lines_.fold(block, block.third, sums + 2 * rows);
      });
    });
    merge<false>();
  }

  void apply() const { lines_.for_lines(isa_.apply[activation_]); }
  void grad_input() const { lines_.for_lines(isa_.gradient[activation_]); }

 private:
  // The sums of a part, for the `width` rows of a group.
  double* part_sums(index_t group, index_t part) const {
    return problem_.sums_of(part, lines_.first_row(group));
  }

  // Part after part in their order, so that the result does not depend on threads.
  template <bool kMoments>
  void merge() const {
    for (index_t row = 0; row < problem_.shape.rows(); ++row) {
      const auto all = ops::merged_parts<kMoments>(problem_, row, 0, 1);
      ops::set_sums<kMoments>(problem_, 0, row, all);
    }
  }

  // Moments in one pass. Block b sums up d = x - shift and d^2, and its moments are merged with
  // those of the blocks before. Its shift is the mean m_{b-1} of block b - 1: then the canceling
  // part, the sum of n (m_b - m_{b-1})^2, is at most four times the result. The first block is read
  // twice, as its shift is its own mean.
  void moments_of(index_t group, index_t part, const TaskBuffers& buffers) const {
    double* const means = part_sums(group, part);
    double* const m2s = means + problem_.shape.rows();
    std::fill_n(means, lines_.width(), 0.0);
    std::fill_n(m2s, lines_.width(), 0.0);
    double before = 0;
    T* const shifts = buffers.values[0];
    lines_.for_blocks(group, part, buffers, [&](const Block& block) {
      const auto count = static_cast<double>(block.elements / lines_.width());
      if (before == 0) {
        isa_.total(block);
        std::fill_n(buffers.sums, lines_.width(), 0.0);
        lines_.fold(block, block.first, buffers.sums);
        for (index_t c = 0; c < lines_.width(); ++c)
          shifts[c] = static_cast<T>(buffers.sums[c] / count);
        lines_.repeat(shifts);
      }
      isa_.moments(block);
      std::fill_n(buffers.sums, 2 * lines_.width(), 0.0);
      lines_.fold(block, block.first, buffers.sums);
      lines_.fold(block, block.second, buffers.squares);
      for (index_t c = 0; c < lines_.width(); ++c) {
        const RowMoments own =
            ops::shifted_moments(count, shifts[c], buffers.sums[c], buffers.squares[c]);
        RowMoments all{before, means[c], m2s[c]};
        all.merge(own);
        means[c] = all.mean;
        m2s[c] = all.m2;
        shifts[c] = static_cast<T>(own.mean);
      }
      lines_.repeat(shifts);
      before += count;
    });
  }

  const NormProblem& problem_;
  const NormIsa<Storage, T>& isa_;
  const Lines lines_;
  const int activation_;  // index of the tables' arrays
};

template <class F>
void with_normalizer(const NormProblem& problem, const F& f) {
  ops::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
    f(Normalizer<Storage>(problem));
  });
}

// The cost of an entry in bytes of traffic, for the choice of threads: its numbers and arithmetic.
constexpr index_t kEntryBytes = 256;

template <template <class> class Body>
void run_rows(const ops::NormRows& norm) {
  ops::dispatch_rows(norm, [&]<class T>(std::type_identity<T>) {
    const Body<T> body{{{}, norm}};
    launch::run_on_cpu(body, body.entries() * kEntryBytes);
  });
}

}  // namespace

void norm_moments(const NormProblem& problem) {
  with_normalizer(problem, [](const auto& normalizer) { normalizer.moments(); });
}

void norm_apply(const NormProblem& problem) {
  with_normalizer(problem, [](const auto& normalizer) { normalizer.apply(); });
}

void norm_grad_sums(const NormProblem& problem) {
  with_normalizer(problem, [](const auto& normalizer) { normalizer.grad_sums(); });
}

void norm_grad_input(const NormProblem& problem) {
  with_normalizer(problem, [](const auto& normalizer) { normalizer.grad_input(); });
}

void norm_merge_parts(const ops::NormParts& parts) {
  launch::run_on_cpu(ops::NormMergePartsBody{{}, parts}, parts.statistics * kEntryBytes);
}

void norm_values(const ops::NormRows& norm) { run_rows<ops::NormValuesBody>(norm); }
void norm_totals(const ops::NormRows& norm) { run_rows<ops::NormTotalsBody>(norm); }
void norm_coefficients(const ops::NormRows& norm) { run_rows<ops::NormCoefficientsBody>(norm); }
void norm_slopes(const ops::NormRows& norm) { run_rows<ops::NormSlopesBody>(norm); }

}  // namespace pydist::cpu
