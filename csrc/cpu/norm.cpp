#include "cpu/norm.hpp"

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "cpu/isa.hpp"
#include "cpu/scratch.hpp"
#include "kernels/dispatch.hpp"
#include "launch/cpu.hpp"
#include "launch/thread_pool.hpp"

namespace pydist::cpu {
namespace {

using kernels::BFloat16;
using kernels::Float16;
using kernels::NormProblem;
using kernels::NormShape;
using kernels::RowMoments;

// Elements that are summed up in T before double takes over; they stay in the nearest cache.
constexpr index_t kBlock = 8192;
// With many columns it takes more of them, as what is summed up of each has to be merged.
constexpr index_t kRows = 32;
constexpr index_t kLongBlock = 1 << 16;
constexpr index_t kTaskElements = 1 << 16;

template <class Storage>
const auto& isa_of() {
  const NormTable& table = *isa().norm;
  if constexpr (std::is_same_v<Storage, Float16>) return table.f16;
  if constexpr (std::is_same_v<Storage, BFloat16>) return table.bf16;
  if constexpr (std::is_same_v<Storage, float>) return table.f32;
  if constexpr (std::is_same_v<Storage, double>) return table.f64;
}

// Memory is taken as lines: pieces in which the channels repeat every `width` elements. Of
// channels-last arrays a line is a sample (width: all channels), else a channel of one (width 1).
// Values of the channels are laid out for columns, a multiple of the width that vectors divide.
template <class Storage>
class Normalizer {
  using T = kernels::accumulator_t<Storage>;
  using Block = NormBlock<Storage, T>;
  using Kernel = typename NormIsa<Storage, T>::Kernel;

 public:
  explicit Normalizer(const NormProblem& problem)
      : problem_(problem),
        shape_(problem.shape),
        isa_(isa_of<Storage>()),
        width_(shape_.channels_last ? shape_.channels : 1),
        lines_(shape_.channels_last ? shape_.samples : shape_.samples * shape_.channels),
        columns_(columns_of(width_, isa_)),
        activation_(static_cast<int>(kernels::activation_of(problem.slope))) {}

  void moments() const {
    for_parts(
        [&](index_t group, index_t part, const Work& work) { moments_of(group, part, work); });
    merge<true>();
  }

  void grad_sums() const {
    for_parts([&](index_t group, index_t part, const Work& work) {
      double* const sums = part_sums(group, part);
      std::fill_n(sums, width_, 0.0);
      std::fill_n(sums + shape_.rows(), width_, 0.0);
      spread_values(first_row(group), work);
      for_blocks(group, part, work, [&](const Block& block) {
        isa_.sums[activation_](block);
        fold(block, block.first, sums);
        fold(block, block.second, sums + shape_.rows());
      });
    });
    merge<false>();
  }

  void apply() const { for_lines(isa_.apply[activation_]); }
  void grad_input() const { for_lines(isa_.gradient[activation_]); }

 private:
  // The memory of a task. [columns] but for the doubles, which are [width].
  struct Work {
    T* values[6];  // mean, factor, offset, a, b, d
    T *first, *second;
    double *sums, *squares;
  };

  Work take(index_t columns) const {
    static thread_local Scratch scratch;
    const index_t padded = ceil_div(columns, kAlign) * kAlign;
    double* const doubles = scratch.take<double>(8 * padded + 2 * width_);
    T* const memory = reinterpret_cast<T*>(doubles + 2 * width_);
    Work work{};
    for (int i = 0; i < 6; ++i) work.values[i] = memory + i * padded;
    work.first = memory + 6 * padded;
    work.second = memory + 7 * padded;
    work.sums = doubles;
    work.squares = doubles + width_;
    return work;
  }

  // Few columns are whole tiles; more of them whole vectors, so that their rows stay short.
  static index_t columns_of(index_t width, const NormIsa<Storage, T>& isa) {
    const auto columns = std::lcm(width, static_cast<index_t>(isa.lanes));
    return columns < 2 * isa.tile ? std::lcm(columns, static_cast<index_t>(isa.tile)) : columns;
  }

  // Rows that share a task of sums: `width` from this one on.
  index_t first_row(index_t group) const {
    return shape_.channels_last ? shape_.row(group, 0) : group;
  }

  double* part_sums(index_t group, index_t part) const {
    return problem_.sums + 2 * part * shape_.rows() + first_row(group);
  }

  // Calls f(group, part, work) for the tasks of sums.
  template <class F>
  void for_parts(const F& f) const {
    const index_t tasks = shape_.rows() / width_ * problem_.parts;
    if (tasks == 0) return;
    launch::parallel_for(tasks, grain(tasks), [&](index_t task) {
      f(task / problem_.parts, task % problem_.parts, take(columns_));
    });
  }

  template <bool kMoments>
  void merge() const {
    for (index_t row = 0; row < shape_.rows(); ++row) kernels::merge_parts<kMoments>(problem_, row);
  }

  index_t grain(index_t tasks) const {
    const index_t bytes = shape_.elements() * static_cast<index_t>(sizeof(Storage));
    return std::max<index_t>(tasks * launch::kBytesPerThread / std::max<index_t>(bytes, 1), 1);
  }

  // Calls f(block) for the blocks of a part, sample by sample if these share rows.
  template <class F>
  void for_blocks(index_t group, index_t part, const Work& work, const F& f) const {
    const index_t begin = problem_.part_begin(part) * width_;
    const index_t end = problem_.part_begin(part + 1) * width_;
    // Lines of a row are as far apart as those of adjacent samples.
    const index_t step = shape_.channels_last ? 1 : shape_.channels;
    const index_t lines = shape_.per_sample ? 1 : shape_.samples;
    for (index_t line = 0; line < lines; ++line) {
      for_line(group + line * step, begin, end, work, f);
    }
  }

  // Calls f(block) for the elements [begin, end) of a line.
  template <class F>
  void for_line(index_t line, index_t begin, index_t end, const Work& work, const F& f) const {
    const index_t rows =
        std::max<index_t>({kBlock / columns_, std::min(kRows, kLongBlock / columns_), 1});
    const index_t most = rows * columns_;
    const index_t length = width_ * shape_.positions;
    const auto at = [&](const void* array, index_t element) {
      return array == nullptr ? nullptr
                              : static_cast<const Storage*>(array) + line * length + element;
    };
    for (index_t element = begin; element < end; element += most) {
      const index_t count = std::min(most, end - element);
      Block block{};
      block.x = at(problem_.x, element);
      block.grad = at(problem_.grad, element);
      block.out = const_cast<Storage*>(at(problem_.out, element));
      block.elements = count;
      block.columns = std::min(columns_, count);
      block.mean = work.values[0];
      block.factor = work.values[1];
      block.offset = work.values[2];
      block.a = work.values[3];
      block.b = work.values[4];
      block.d = work.values[5];
      block.slope = static_cast<T>(problem_.slope);
      block.first = work.first;
      block.second = work.second;
      f(block);
    }
  }

  // The shift of each block is the mean of the one before (m_b of block b): what cancels then,
  // sum n (m_b - m_{b-1})^2, is at most four times the result. That of the first is its own.
  void moments_of(index_t group, index_t part, const Work& work) const {
    double* const means = part_sums(group, part);
    double* const m2s = means + shape_.rows();
    std::fill_n(means, width_, 0.0);
    std::fill_n(m2s, width_, 0.0);
    double before = 0;
    T* const shifts = work.values[0];
    for_blocks(group, part, work, [&](const Block& block) {
      const auto count = static_cast<double>(block.elements / width_);
      if (before == 0) {
        isa_.total(block);
        std::fill_n(work.sums, width_, 0.0);
        fold(block, block.first, work.sums);
        for (index_t c = 0; c < width_; ++c) shifts[c] = static_cast<T>(work.sums[c] / count);
        repeat(shifts);
      }
      isa_.moments(block);
      std::fill_n(work.sums, 2 * width_, 0.0);
      fold(block, block.first, work.sums);
      fold(block, block.second, work.squares);
      for (index_t c = 0; c < width_; ++c) {
        const RowMoments own =
            kernels::shifted_moments(count, shifts[c], work.sums[c], work.squares[c]);
        RowMoments all{before, means[c], m2s[c]};
        all.merge(own);
        means[c] = all.mean;
        m2s[c] = all.m2;
        shifts[c] = static_cast<T>(own.mean);
      }
      repeat(shifts);
      before += count;
    });
  }

  // sums[c] += the columns of channel c.
  void fold(const Block& block, const T* columns, double* sums) const {
    if (width_ == 1) {
      constexpr index_t kApart = 8;  // additions that need not wait for each other
      double apart[kApart] = {};
      for (index_t start = 0; start < block.columns; start += kApart) {
        const index_t count = std::min(kApart, block.columns - start);
        for (index_t i = 0; i < count; ++i) apart[i] += static_cast<double>(columns[start + i]);
      }
      sums[0] += std::accumulate(apart, apart + kApart, 0.0);
      return;
    }
    for (index_t start = 0; start < block.columns; start += width_) {
      for (index_t c = 0; c < width_; ++c) sums[c] += static_cast<double>(columns[start + c]);
    }
  }

  // Fills the columns behind the first `width` with these.
  void repeat(T* columns) const {
    if (width_ == 1) {
      std::fill_n(columns, columns_, columns[0]);
      return;
    }
    for (index_t start = width_; start < columns_; start += width_) {
      std::copy_n(columns, width_, columns + start);
    }
  }

  void spread_values(index_t row, const Work& work) const {
    const index_t rows = shape_.rows();
    for (int i = 0; i < 6; ++i) {
      const auto* const given =
          static_cast<const T*>(i < 3 ? problem_.values : problem_.coefficients);
      if (given == nullptr) continue;
      std::copy_n(given + (i % 3) * rows + row, width_, work.values[i]);
      repeat(work.values[i]);
    }
  }

  void for_lines(Kernel kernel) const {
    const index_t length = width_ * shape_.positions;
    if (lines_ * length == 0) return;
    const index_t pieces = ceil_div(length, std::max(kTaskElements, columns_));
    const index_t tasks = lines_ * pieces;
    launch::parallel_for(tasks, grain(tasks), [&](index_t task) {
      const index_t line = task / pieces, piece = task % pieces;
      const Work work = take(columns_);
      spread_values(shape_.channels_last
                        ? shape_.row(line, 0)
                        : shape_.row(line / shape_.channels, line % shape_.channels),
                    work);
      for_line(line, piece * shape_.positions / pieces * width_,
               (piece + 1) * shape_.positions / pieces * width_, work,
               [&](const Block& block) { kernel(block); });
    });
  }

  static constexpr index_t kAlign = 64 / sizeof(T);

  const NormProblem& problem_;
  const NormShape& shape_;
  const NormIsa<Storage, T>& isa_;
  const index_t width_, lines_, columns_;
  const int activation_;
};

template <class F>
void with_normalizer(const NormProblem& problem, const F& f) {
  kernels::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
    f(Normalizer<Storage>(problem));
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

}  // namespace pydist::cpu
