// The writing passes of norms on a device: activations forward, dL/dx backward.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "core/errors.hpp"
#include "launch/run_body.hpp"
#include "ops/common/divisor.hpp"
#include "ops/common/half.hpp"
#include "ops/common/vector.hpp"
#include "ops/norm/problem.hpp"

namespace pydist::ops {

// Writes activations, or dL/dx.
//
// Index formula: with v = (x - mean) factor + offset of the element's row,
//   forward:  out = activation(v)
//   backward: out = a g + (b (x - mean) + d), g = grad times the activation's gradient at v.
// Threads: a warp per run, lanes over its vectors of N adjacent elements. A run is a piece of a
//   channel, whose values stay in registers; channels-last, a piece of the positions of a sample
//   with all channels, and each vector finds its first channel by a Divisor, and reads the values
//   of its channels as vectors.
// Traffic: reads x (and grad) once, writes out once; the rows' values stay in the caches.
// Proof: as of NormSumsBody.
// CPU code: another loop (cpu.cpp has the reason).
template <bool kForward, bool kChannelsLast, Activation kActivation, class Storage, int N>
struct NormWriteBody {
  using T = accumulator_t<Storage>;
  // Values that are read ahead need registers, and so do the values of rows.
  static constexpr bool kManyValues = kChannelsLast && (!kForward || N * sizeof(T) > kVectorBytes);
  static constexpr int kRunBlocks = sizeof(T) == 8 || kManyValues ? 2 : 3;
  NormProblem problem;
  index_t value_rows;  // problem.shape.rows()
  index_t units;       // of a channel: vectors; channels-last, of a sample: positions
  index_t piece;       // units of a run; the last one of a channel or sample may have fewer
  Divisor pieces;      // of a channel or sample
  Divisor vectors;     // of a unit
  Divisor channels;

  static NormWriteBody make(const NormProblem& problem) {
    const NormShape& shape = problem.shape;
    NormWriteBody body{};
    body.problem = problem;
    body.value_rows = shape.rows();
    body.channels = Divisor::by(std::max<index_t>(shape.channels, 1));
    body.vectors = Divisor::by(kChannelsLast ? std::max<index_t>(shape.channels / N, 1) : 1);
    body.units = kChannelsLast ? shape.positions : shape.positions / N;
    const index_t some = std::max<index_t>(body.units, 1);
    body.piece = std::clamp<index_t>(kPiece / (N * body.vectors.divisor), 1, some);
    body.pieces = Divisor::by(ceil_div(some, body.piece));
    PYDIST_EXPECT(body.rows() <= std::numeric_limits<std::int32_t>::max(),
                  "a norm with " + std::to_string(body.rows()) +
                      " pieces of its array is too large for a device");
    return body;
  }

  // `row`: of the values; channels-last, that of channel 0. `begin`: the first element of the
  // array. `count`: vectors of N elements.
  struct Run {
    index_t row, begin, count;
  };

  // Vectors of a full run, by which the launcher chooses the lanes.
  PYDIST_HD index_t run_length() const { return piece * vectors.divisor; }
  PYDIST_HD index_t rows() const {
    return problem.shape.samples * (kChannelsLast ? 1 : problem.shape.channels) * pieces.divisor;
  }
  // Run number = C-order index over (sample, channel unless channels-last, piece).
  PYDIST_HD Run row(index_t r) const {
    const auto number = static_cast<std::int32_t>(r);
    const std::int32_t line = pieces.quotient(number);
    const index_t first = (number - line * pieces.divisor) * piece;
    const index_t left = units - first, count = left < piece ? left : piece;
    const index_t start_row = kChannelsLast ? problem.shape.row(line, 0)
                              : problem.shape.per_sample
                                  ? line
                                  : line - channels.quotient(line) * channels.divisor;
    return {start_row, (line * units + first) * vectors.divisor * N, count * vectors.divisor};
  }

  template <class Loop>
  PYDIST_HD void each(const Run& run, const Loop& loop) const {
    const auto read = [this, run](index_t j) { return read_at(run.begin + j * N); };
    if constexpr (kChannelsLast) {
      loop(run.count,
           launch::Move{read, [this, run](index_t j, const Given& given) {
                          const auto i = static_cast<std::int32_t>(j);
                          const std::int32_t vector = i - vectors.quotient(i) * vectors.divisor;
                          write(run.begin + j * N, given, values_of<N>(run.row + vector * N));
                        }});
    } else {
      const auto values = values_of<1>(run.row);
      loop(run.count, launch::Move{read, [this, run, values](index_t j, const Given& given) {
                                     write(run.begin + j * N, given, values);
                                   }});
    }
  }

 private:
  static constexpr index_t kPiece = 2048;  // approximate elements of a run: 64 per lane of a warp

  // The values of the rows of a vector: of M = N rows, or of one.
  template <int M>
  struct Values {
    Vector<T, M> mean, factor, offset, slope, a, b, d;
  };
  template <int M>
  PYDIST_HD Values<M> values_of(index_t row) const {
    const auto read = [this, row](const void* values, int which) {
      return Vector<T, M>::load(static_cast<const T*>(values) + which * value_rows + row);
    };
    Values<M> found{};
    found.mean = read(problem.values, 0);
    found.factor = read(problem.values, 1);
    found.offset = read(problem.values, 2);
    if constexpr (kActivation == Activation::kPrelu) found.slope = read(problem.values, 3);
    if constexpr (!kForward) {
      found.a = read(problem.coefficients, 0);
      found.b = read(problem.coefficients, 1);
      found.d = read(problem.coefficients, 2);
    }
    return found;
  }

  // Elements of x and, backward, of the gradient.
  struct Given {
    Vector<Storage, N> x[kForward ? 1 : 2];
  };
  PYDIST_HD Given read_at(index_t element) const {
    using Read = Vector<Storage, N>;
    Given given{};
    given.x[0] = Read::load(static_cast<const Storage*>(problem.x) + element);
    if constexpr (!kForward) {
      given.x[1] = Read::load(static_cast<const Storage*>(problem.grad) + element);
    }
    return given;
  }

  // Computes and stores a vector. For M = 1 its elements share a row, else each has its own.
  template <int M>
  PYDIST_HD void write(index_t element, const Given& given, const Values<M>& values) const {
    Vector<Storage, N> results;
    PYDIST_UNROLLED
    for (int e = 0; e < N; ++e) {
      const int row = M == 1 ? 0 : e;
      const T slope = kActivation == Activation::kPrelu ? values.slope.element[row]
                                                        : static_cast<T>(problem.slope);
      const T centered = load_as(given.x[0].element[e]) - values.mean.element[row];
      const T value = normalized(centered, values.factor.element[row], values.offset.element[row]);
      T result;
      if constexpr (kForward) {
        result = activated<kActivation>(value, slope);
      } else {
        const T grad = load_as(given.x[1].element[e]);
        result = values.a.element[row] * activation_gradient<kActivation>(value, grad, slope) +
                 (values.b.element[row] * centered + values.d.element[row]);
      }
      results.element[e] = store_as<Storage>(result);
    }
    results.store(static_cast<Storage*>(problem.out) + element);
  }
};

// Calls f(body) with the body for a problem: of vectors if all arrays and values can be accessed
// so. Storage and kActivation are the problem's.
template <bool kForward, Activation kActivation, class Storage, class F>
void with_norm_write_body(const NormProblem& problem, const F& f) {
  const void* const grad = kForward ? nullptr : problem.grad;
  const void* const coefficients = kForward ? nullptr : problem.coefficients;
  const auto with = [&]<int N>(std::integral_constant<int, N>) {
    if (problem.shape.channels_last) {
      f(NormWriteBody<kForward, true, kActivation, Storage, N>::make(problem));
    } else {
      f(NormWriteBody<kForward, false, kActivation, Storage, N>::make(problem));
    }
  };
  constexpr int kWide = kVectorElements<Storage>;
  if (has_norm_vectors<Storage>(problem, {problem.x, grad, problem.out},
                                {problem.values, coefficients}, kWide)) {
    with(std::integral_constant<int, kWide>{});
  } else {
    with(std::integral_constant<int, 1>{});
  }
}

// Calls f(std::integral_constant<Activation, a>) with the activation of a problem.
template <class F>
void dispatch_activation(const NormProblem& problem, const F& f) {
  if (problem.learned) return f(std::integral_constant<Activation, Activation::kPrelu>{});
  dispatch_activation(problem.slope, f);
}

}  // namespace pydist::ops
