// The computations of a norm on the statistics of its rows, between its passes over the elements.
//
// These are a few hundred numbers. As calls of torch, each step of their arithmetic would be a
// launch on a device, and on the CPU more time than the passes of a small layer.
//
// All arithmetic is in double; only inputs of the passes are rounded to T. The mean m of a row is
// rounded to T in `values`, so passes work with x - mean where mean = m - lost: the terms with
// `lost` below correct the rounding.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/dtype.hpp"
#include "core/index.hpp"
#include "launch/host_device.hpp"
#include "ops/norm/problem.hpp"

namespace pydist::ops {

// Numbers of the rows of a norm; kernels.hpp lists the ones that each kernel uses. T is double if
// `wide`, else float. A statistic is that of `members` consecutive rows; the channel of a row is
// its number modulo `channels`. With the means m and the deviations s = sqrt(variance + eps) of
// `moments`, g = dy times the activation's gradient, and the values of NormProblem:
//   values:       mean = m rounded to T, factor = scale / s, offset = shift and m's rounding error
//   totals:       totals = sums over a statistic's rows of scale Σ g and scale Σ g (x - m);
//                 affine = sums over the samples of Σ g, which is dL/dshift, and of Σ g (x - m) /
//                 s, which is dL/dscale; both from `sums`, whose second row is Σ g (x - mean)
//   coefficients: a, b, d with dL/dx = a g + b (x - mean) + d, from the totals over all ranks
//   slopes:       values[3] = the slopes
struct NormRows {
  bool wide;
  bool centered;  // whether the mean is subtracted; if not, the mean of squares is the variance
  index_t statistics, members, channels;
  double eps;
  const double* moments;      // [3][statistics]: number of values, mean, squared deviations
  const void *scale, *shift;  // T[channels], or null
  const void* slopes;         // T[channels]
  void* values;               // T[3 or 4][rows]
  const double* sums;         // [2][rows]
  double* totals;             // [2][statistics]
  double* affine;             // [2][channels], or null
  void* coefficients;         // T[3][rows]

  PYDIST_HD index_t rows() const { return statistics * members; }
};

struct RowStatistics {
  double n, mean, inverse;  // of the deviation

  PYDIST_HD static RowStatistics of(const NormRows& norm, index_t statistic) {
    const double count = norm.moments[statistic], mean = norm.moments[norm.statistics + statistic];
    const double m2 = norm.moments[2 * norm.statistics + statistic];
    const double n = count < 1 ? 1 : count;
    const double variance = (norm.centered ? m2 : m2 + count * mean * mean) / n;
    return {n, norm.centered ? mean : 0, 1 / sqrt(variance + norm.eps)};
  }
};

// Parts of statistics, float64 [parts][statistics] with any strides; a part may be empty.
struct NormParts {
  index_t parts, statistics;
  const double *n, *mean, *m2;
  index_t n_strides[2], mean_strides[2], m2_strides[2];
  double* out;  // [3][statistics]: the moments of their union
};

// Entries that are independent of each other.
//
// Threads: CPU, one unless there are thousands of entries; CUDA, a lane per entry, a warp per run
// of 32.
// Traffic: some numbers per entry, which the passes have just written.
// Proof: tests/native/test_norm_rows.cpp, against plain loops.
// CPU code: these bodies.
template <class Derived>
struct EntryBody {
  static constexpr index_t kRun = 32;

  PYDIST_HD index_t rows() const { return ceil_div(self().entries(), kRun); }
  PYDIST_HD index_t row(index_t r) const { return r * kRun; }
  template <class Loop>
  PYDIST_HD void each(index_t first, const Loop& loop) const {
    const Derived body = self();
    loop(std::min(index_t{kRun}, body.entries() - first), [=](index_t j) { body.at(first + j); });
  }

 private:
  PYDIST_HD const Derived& self() const { return static_cast<const Derived&>(*this); }
};

// out = the moments of the union of parts, merged in their order (RowMoments::merge). One entry is
// a statistic; ranks are the parts, so every rank computes the same bits.
struct NormMergePartsBody : EntryBody<NormMergePartsBody> {
  NormParts given;

  PYDIST_HD index_t entries() const { return given.statistics; }
  PYDIST_HD void at(index_t i) const {
    RowMoments all{0, 0, 0};
    PYDIST_ROLLED
    for (index_t part = 0; part < given.parts; ++part) {
      const auto read = [part, i](const double* from, const index_t* strides) {
        return from[part * strides[0] + i * strides[1]];
      };
      all.merge({read(given.n, given.n_strides), read(given.mean, given.mean_strides),
                 read(given.m2, given.m2_strides)});
    }
    given.out[i] = all.count;
    given.out[given.statistics + i] = all.mean;
    given.out[2 * given.statistics + i] = all.m2;
  }
};

// Reads and writes of the entries below, which are rows unless they say otherwise.
template <class Derived, class T>
struct NormRowsBody : EntryBody<Derived> {
  NormRows norm;

 protected:
  PYDIST_HD T* value(int which, index_t row) const {
    return static_cast<T*>(norm.values) + which * norm.rows() + row;
  }
  PYDIST_HD double of_channel(const void* numbers, index_t row, double otherwise) const {
    if (numbers == nullptr) return otherwise;
    return static_cast<double>(static_cast<const T*>(numbers)[row % norm.channels]);
  }
};

// values[:3] = mean, factor, offset, which norm_apply and the gradients' passes read.
template <class T>
struct NormValuesBody : NormRowsBody<NormValuesBody<T>, T> {
  PYDIST_HD index_t entries() const { return this->norm.rows(); }
  PYDIST_HD void at(index_t row) const {
    const RowStatistics found = RowStatistics::of(this->norm, row / this->norm.members);
    const T mean = static_cast<T>(found.mean);
    const double factor = found.inverse * this->of_channel(this->norm.scale, row, 1);
    const double lost = (static_cast<double>(mean) - found.mean) * factor;
    *this->value(0, row) = mean;
    *this->value(1, row) = static_cast<T>(factor);
    *this->value(2, row) = static_cast<T>(lost + this->of_channel(this->norm.shift, row, 0));
  }
};

// totals and affine of NormRows. The first entries are statistics, each a sum over its rows; then
// come channels, each a sum over the samples. All sums go in the order of rows.
template <class T>
struct NormTotalsBody : NormRowsBody<NormTotalsBody<T>, T> {
  PYDIST_HD index_t entries() const {
    return this->norm.statistics + (this->norm.affine == nullptr ? 0 : this->norm.channels);
  }
  PYDIST_HD void at(index_t entry) const {
    const NormRows& norm = this->norm;
    if (entry < norm.statistics) {
      const double mean = RowStatistics::of(norm, entry).mean;
      double first = 0, second = 0;
      PYDIST_ROLLED
      for (index_t row = entry * norm.members; row < (entry + 1) * norm.members; ++row) {
        const double scale = this->of_channel(norm.scale, row, 1);
        first += scale * norm.sums[row];
        second += scale * products(row, mean);
      }
      norm.totals[entry] = first;
      norm.totals[norm.statistics + entry] = second;
      return;
    }
    const index_t channel = entry - norm.statistics;
    double of_shift = 0, of_scale = 0;
    PYDIST_ROLLED
    for (index_t row = channel; row < norm.rows(); row += norm.channels) {
      const RowStatistics found = RowStatistics::of(norm, row / norm.members);
      of_shift += norm.sums[row];
      of_scale += products(row, found.mean) * found.inverse;
    }
    norm.affine[channel] = of_shift;
    norm.affine[norm.channels + channel] = of_scale;
  }

 private:
  // Σ g (x - m) of a row, from Σ g (x - mean) and Σ g.
  PYDIST_HD double products(index_t row, double mean) const {
    const double lost = mean - static_cast<double>(*this->value(0, row));
    return this->norm.sums[this->norm.rows() + row] - this->norm.sums[row] * lost;
  }
};

// The gradient of a norm in the form a g + b (x - mean) + d, which grad_input evaluates per
//   element:
//   dL/dx = scale / s * g  -  totals[0] / (s n)  -  (x - m) totals[1] / (s^3 n)
// so a = scale / s, b = -totals[1] / (s^3 n), and d has the constant term and b times `lost`. Not
// centered (RMS norm): without the second term.
template <class T>
struct NormCoefficientsBody : NormRowsBody<NormCoefficientsBody<T>, T> {
  PYDIST_HD index_t entries() const { return this->norm.rows(); }
  PYDIST_HD void at(index_t row) const {
    const NormRows& norm = this->norm;
    const index_t statistic = row / norm.members;
    const RowStatistics found = RowStatistics::of(norm, statistic);
    const double inverse = found.inverse, cubed = inverse * inverse * inverse;
    const double b = -cubed * norm.totals[norm.statistics + statistic] / found.n;
    double d = -b * (found.mean - static_cast<double>(*this->value(0, row)));
    if (norm.centered) d -= inverse * norm.totals[statistic] / found.n;
    T* const out = static_cast<T*>(norm.coefficients) + row;
    out[0] = static_cast<T>(inverse * this->of_channel(norm.scale, row, 1));
    out[norm.rows()] = static_cast<T>(b);
    out[2 * norm.rows()] = static_cast<T>(d);
  }
};

// values[3] = the slopes of PReLU, spread from channels to rows.
template <class T>
struct NormSlopesBody : NormRowsBody<NormSlopesBody<T>, T> {
  PYDIST_HD index_t entries() const { return this->norm.rows(); }
  PYDIST_HD void at(index_t row) const {
    *this->value(3, row) = static_cast<const T*>(this->norm.slopes)[row % this->norm.channels];
  }
};

// Calls f(std::type_identity<T>) with the type of the values.
template <class F>
void dispatch_rows(const NormRows& norm, const F& f) {
  if (norm.wide) {
    f(std::type_identity<double>{});
  } else {
    f(std::type_identity<float>{});
  }
}

}  // namespace pydist::ops
