// Norms with an activation after them: the problem, and its arithmetic for scalars and vectors.
//
// A row has its own mean and scale: a channel, or a channel of one sample. A norm over groups of
// channels (group, layer norm) has rows of channels of one sample, and merges the statistics of a
// group's rows between the passes (rows_body.hpp).
//
// Forward is moments, then (all ranks' moments merged) values, then apply: x is read twice and the
// result written once, activation included. Backward is grad_sums, totals summed over ranks,
// coefficients, grad_input: x and the gradient are read twice each. The value before the activation
// is not kept: backward recomputes it from x.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "core/dtype.hpp"
#include "core/index.hpp"
#include "launch/host_device.hpp"
#include "ops/common/activation.hpp"
#include "ops/common/half.hpp"
#include "ops/common/vector.hpp"

namespace pydist::ops {

// The value of an element before the activation, in forward. Backward finds the sign of the
// activation by the same expression, so that both agree where the result is 0 up to rounding.
template <class V>
PYDIST_HD V normalized(V centered, V factor, V offset) {
  return centered * factor + offset;
}

// A dense array [samples, channels, positions], or [samples, positions, channels] in memory.
struct NormShape {
  index_t samples, channels, positions;
  bool channels_last;
  bool per_sample;  // rows are channels of one sample, in C order; else channels

  PYDIST_HD index_t rows() const { return per_sample ? samples * channels : channels; }
  PYDIST_HD index_t row(index_t sample, index_t channel) const {
    return per_sample ? sample * channels + channel : channel;
  }
  PYDIST_HD index_t elements() const { return samples * channels * positions; }
  // Values of a row at `count` positions.
  PYDIST_HD index_t values(index_t count) const { return per_sample ? count : samples * count; }

  // Strides in memory, in elements.
  PYDIST_HD index_t channel_stride() const { return channels_last ? 1 : positions; }
  PYDIST_HD index_t position_stride() const { return channels_last ? channels : 1; }
  PYDIST_HD index_t offset(index_t sample, index_t channel, index_t position) const {
    return sample * channels * positions + channel * channel_stride() +
           position * position_stride();
  }
};

// Arrays of a norm; kernels.hpp lists the ones that each kernel uses. T is the accumulator type:
// float, or double for double. With c = x - mean:
//   moments:    sums = mean and the sum of (x - mean)^2 of each row; without `mean`
//   apply:      out = activation(c factor + offset)
//   grad_sums:  sums = sum of g and sum of g c, where g = grad times the activation's gradient;
//               with learned slopes, also the sum of the terms of their gradient
//   grad_input: out = a g + (b c + d)
struct NormProblem {
  DType dtype;  // of x, grad and out
  NormShape shape;
  double slope;  // of the activation, see activation_of
  bool learned;  // the slopes are values[3], of PReLU
  const void *x, *grad;
  void* out;
  const void* values;        // T[3 or 4][rows]: mean, factor, offset, slope
  const void* coefficients;  // T[3][rows]: a, b, d
  // [parts][2 or 3][rows]: the sums of each part of the positions; in the end, part 0 holds the
  // sums over all parts. The caller sets the number of parts, so results do not depend on threads.
  double* sums;
  index_t parts;

  PYDIST_HD Activation activation() const {
    return learned ? Activation::kPrelu : activation_of(slope);
  }
  PYDIST_HD index_t part_begin(index_t part) const { return part * shape.positions / parts; }
  // The first of a part's sums of a row; the others follow `shape.rows()` apart.
  PYDIST_HD double* sums_of(index_t part, index_t row) const {
    return sums + (learned ? 3 : 2) * part * shape.rows() + row;
  }
};

// Whether a pass can access elements, and the values of their rows, as vectors.
template <class Storage>
bool has_norm_vectors(const NormProblem& problem, std::initializer_list<const void*> arrays,
                      std::initializer_list<const void*> values, int elements) {
  VectorFit fit{elements};
  const NormShape& shape = problem.shape;
  fit.multiple(shape.channels_last ? shape.channels : shape.positions);
  for (const void* array : arrays) fit.address(array, sizeof(Storage));
  if (shape.channels_last) {
    for (const void* array : values) fit.address(array, sizeof(accumulator_t<Storage>));
  }
  return fit.fits;
}

// Mean and sum of squared deviations of `count` values.
//
// Source: Chan, Golub, LeVeque (1983), "Algorithms for computing the sample variance".
struct RowMoments {
  double count, mean, m2;

  PYDIST_HD void merge(const RowMoments& other) {
    const double total = count + other.count;
    if (total == 0) return;
    const double share = other.count / total, distance = other.mean - mean;
    mean += distance * share;
    m2 += other.m2 + distance * distance * count * share;
    count = total;
  }
};

// Moments from sums of d and d^2, where d = value - shift:
//   mean = shift + sum / n,  m2 = squares - sum^2 / n.
// The closer the shift is to the mean, the less cancels in the difference.
PYDIST_HD RowMoments shifted_moments(double count, double shift, double sum, double squares) {
  const double mean = sum / count, m2 = squares - sum * mean;
  return {count, shift + mean, m2 < 0 ? 0 : m2};  // NaN stays
}

// Merges the parts first, first + step, ..., in their order: the moments of a row or, instead of
// mean, m2 and count, its sums. Used by device threads (one start each) and by the CPU (first 0,
// step 1).
template <bool kMoments>
PYDIST_HD RowMoments merged_parts(const NormProblem& problem, index_t row, index_t first,
                                  index_t step) {
  const index_t rows = problem.shape.rows();
  RowMoments all{0, 0, 0};
  PYDIST_ROLLED
  for (index_t part = first; part < problem.parts; part += step) {
    const double* const sums = problem.sums_of(part, row);
    if constexpr (kMoments) {
      const index_t positions = problem.part_begin(part + 1) - problem.part_begin(part);
      all.merge({static_cast<double>(problem.shape.values(positions)), sums[0], sums[rows]});
    } else {
      all.mean += sums[0];
      all.m2 += sums[rows];
      if (problem.learned) all.count += sums[2 * rows];
    }
  }
  return all;
}

// Stores the result of merged_parts as the sums of one part.
template <bool kMoments>
PYDIST_HD void set_sums(const NormProblem& problem, index_t part, index_t row,
                        const RowMoments& found) {
  const index_t rows = problem.shape.rows();
  double* const sums = problem.sums_of(part, row);
  sums[0] = found.mean;
  sums[rows] = found.m2;
  if (!kMoments && problem.learned) sums[2 * rows] = found.count;
}

}  // namespace pydist::ops
