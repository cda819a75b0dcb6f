// The memory order of the CPU's norms: tasks, and blocks of elements for the inner loops.
//
//   array   [samples][channels][positions]      or  [samples][positions][channels]
//   line    the positions of one channel            a full sample
//   width   1                                       channels
//   task    sums: a part of the positions of a group of rows; writes: a piece of a line
//   block   up to kNormBlock consecutive elements of a line, for one call of an inner loop
//
// An inner loop sees a block as rows of `columns` elements (isa_tables.hpp). `columns` is a
// multiple of the width and of the vector length, so that a loop need not find the channel of an
// element.
#pragma once

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "launch/cpu.hpp"
#include "launch/scratch.hpp"
#include "launch/thread_pool.hpp"
#include "ops/common/half.hpp"
#include "ops/norm/isa_tables.hpp"
#include "ops/norm/problem.hpp"

namespace pydist::cpu {

// Elements that are summed up in T, before sums in double. 32 KB of floats: the second read of the
// first block (moments) comes from the cache.
inline constexpr index_t kNormBlock = 8192;
// With many columns a block has more elements, so that each column sums up at least kNormRows:
// each column's sum is folded into double afterwards.
inline constexpr index_t kNormRows = 32;
inline constexpr index_t kLongNormBlock = 1 << 16;
inline constexpr index_t kNormTask = 1 << 16;  // approximate elements that a task writes

// The walk of one call. All `for_` functions run their tasks on threads; the memory of a task
// belongs to its thread and is valid until the task ends.
template <class Storage>
class NormLines {
 public:
  using T = ops::accumulator_t<Storage>;
  using Block = NormBlock<Storage, T>;
  using Kernel = typename NormIsa<Storage, T>::Kernel;

  NormLines(const ops::NormProblem& problem, const NormIsa<Storage, T>& isa)
      : problem_(problem),
        shape_(problem.shape),
        width_(shape_.channels_last ? shape_.channels : 1),
        lines_(shape_.channels_last ? shape_.samples : shape_.samples * shape_.channels),
        columns_(columns_of(width_, isa)) {}

  index_t width() const { return width_; }

  static constexpr int kValues = 7;
  // The memory of a task: [columns], but [width] for the doubles.
  struct TaskBuffers {
    T* values[kValues];  // mean, factor, offset, a, b, d, slope
    T *first, *second, *third;
    double *sums, *squares;
  };

  // Rows that share a task of sums: `width` rows from this one on.
  index_t first_row(index_t group) const {
    return shape_.channels_last ? shape_.row(group, 0) : group;
  }

  // Calls f(group, part, buffers) for the tasks of sums, on threads.
  template <class F>
  void for_parts(const F& f) const {
    const index_t tasks = shape_.rows() / width_ * problem_.parts;
    if (tasks == 0) return;
    launch::parallel_for(tasks, grain(tasks), [&](index_t task) {
      f(task / problem_.parts, task % problem_.parts, take(columns_));
    });
  }

  // Calls f(block) for the blocks of a part, in order; if samples share rows (batch norm), sample
  // after sample.
  template <class F>
  void for_blocks(index_t group, index_t part, const TaskBuffers& buffers, const F& f) const {
    const index_t begin = problem_.part_begin(part) * width_;
    const index_t end = problem_.part_begin(part + 1) * width_;
    // Lines of a row are as far apart as lines of adjacent samples.
    const index_t step = shape_.channels_last ? 1 : shape_.channels;
    const index_t lines = shape_.per_sample ? 1 : shape_.samples;
    for (index_t line = 0; line < lines; ++line) {
      for_line(group + line * step, begin, end, buffers, f);
    }
  }

  // sums[c] += the sum of the columns that belong to channel c, in double and in a fixed order.
  void fold(const Block& block, const T* columns, double* sums) const {
    if (width_ == 1) {
      constexpr index_t kApart = 8;  // independent additions
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

  // Repeats the first `width` columns in all others.
  void repeat(T* columns) const {
    if (width_ == 1) {
      std::fill_n(columns, columns_, columns[0]);
      return;
    }
    for (index_t start = width_; start < columns_; start += width_) {
      std::copy_n(columns, width_, columns + start);
    }
  }

  // Copies the values of `width` rows, from `row` on, into the task's memory, repeated for all
  // columns.
  void spread_values(index_t row, const TaskBuffers& buffers) const {
    const index_t rows = shape_.rows();
    const auto fill = [&](const void* given, index_t which, T* columns) {
      if (given == nullptr) return;
      std::copy_n(static_cast<const T*>(given) + which * rows + row, width_, columns);
      repeat(columns);
    };
    for (int i = 0; i < 3; ++i) {
      fill(problem_.values, i, buffers.values[i]);
      fill(problem_.coefficients, i, buffers.values[3 + i]);
    }
    if (problem_.learned) fill(problem_.values, 3, buffers.values[6]);
  }

  // Calls an inner loop for all elements, on threads.
  void for_lines(Kernel kernel) const {
    const index_t length = width_ * shape_.positions;
    if (lines_ * length == 0) return;
    const index_t pieces = ceil_div(length, std::max(kNormTask, columns_));
    const index_t tasks = lines_ * pieces;
    launch::parallel_for(tasks, grain(tasks), [&](index_t task) {
      const index_t line = task / pieces, piece = task % pieces;
      const TaskBuffers buffers = take(columns_);
      spread_values(shape_.channels_last
                        ? shape_.row(line, 0)
                        : shape_.row(line / shape_.channels, line % shape_.channels),
                    buffers);
      for_line(line, piece * shape_.positions / pieces * width_,
               (piece + 1) * shape_.positions / pieces * width_, buffers,
               [&](const Block& block) { kernel(block); });
    });
  }

 private:
  static constexpr index_t kAlign = 64 / sizeof(T);

  TaskBuffers take(index_t columns) const {
    static thread_local Scratch scratch;
    const index_t padded = ceil_div(columns, kAlign) * kAlign;
    double* const doubles = scratch.take<double>(10 * padded + 2 * width_);
    T* const memory = reinterpret_cast<T*>(doubles + 2 * width_);
    TaskBuffers buffers{};
    for (int i = 0; i < kValues; ++i) buffers.values[i] = memory + i * padded;
    buffers.first = memory + kValues * padded;
    buffers.second = buffers.first + padded;
    buffers.third = buffers.second + padded;
    buffers.sums = doubles;
    buffers.squares = doubles + width_;
    return buffers;
  }

  // Few columns are full tiles; more columns are full vectors, so that their rows stay short.
  static index_t columns_of(index_t width, const NormIsa<Storage, T>& isa) {
    const auto columns = std::lcm(width, static_cast<index_t>(isa.lanes));
    return columns < 2 * isa.tile ? std::lcm(columns, static_cast<index_t>(isa.tile)) : columns;
  }

  index_t grain(index_t tasks) const {
    const index_t bytes = shape_.elements() * static_cast<index_t>(sizeof(Storage));
    return std::max<index_t>(tasks * launch::kBytesPerThread / std::max<index_t>(bytes, 1), 1);
  }

  // Calls f(block) for the elements [begin, end) of a line.
  template <class F>
  void for_line(index_t line, index_t begin, index_t end, const TaskBuffers& buffers,
                const F& f) const {
    const index_t rows = std::max<index_t>(
        {kNormBlock / columns_, std::min(kNormRows, kLongNormBlock / columns_), 1});
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
      block.mean = buffers.values[0];
      block.factor = buffers.values[1];
      block.offset = buffers.values[2];
      block.a = buffers.values[3];
      block.b = buffers.values[4];
      block.d = buffers.values[5];
      block.slopes = buffers.values[6];
      block.slope = static_cast<T>(problem_.slope);
      block.first = buffers.first;
      block.second = buffers.second;
      block.third = buffers.third;
      f(block);
    }
  }

  const ops::NormProblem& problem_;
  const ops::NormShape& shape_;
  const index_t width_, lines_, columns_;
};

}  // namespace pydist::cpu
