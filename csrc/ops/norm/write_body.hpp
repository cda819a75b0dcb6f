// The writing passes of norms on a device: activations forward, dL/dx backward.
#pragma once

#include <algorithm>
#include <type_traits>

#include "launch/run_body.hpp"
#include "ops/common/divisor.hpp"
#include "ops/common/half.hpp"
#include "ops/norm/problem.hpp"

namespace pydist::ops {

// Writes activations, or dL/dx.
//
// Index formula: with v = (x - mean) factor + offset of the element's row,
//   forward:  out = activation(v)
//   backward: out = a g + (b (x - mean) + d), g = grad times the activation's gradient at v.
// Threads: a warp per run, lanes over its elements. A run is a piece of a channel, whose values
//   stay in registers; channels-last, a piece of the positions of a sample with all channels, and
//   each element finds its channel by a Divisor.
// Traffic: reads x (and grad) once, writes out once; the rows' values stay in the caches.
// Proof: as of NormSumsBody.
// CPU code: another loop (cpu.cpp has the reason).
template <bool kForward, bool kChannelsLast, Activation kActivation, class Storage>
struct NormWriteBody {
  using T = accumulator_t<Storage>;
  // Values that are read ahead need registers, and so do the values of a row.
  static constexpr int kRunBlocks = sizeof(T) == 8 || (kChannelsLast && !kForward) ? 2 : 3;
  NormProblem problem;
  index_t value_rows;  // problem.shape.rows()
  index_t pieces;      // of a channel's positions, or a sample's
  Divisor channels;    // channels-last: of an element of a run

  static NormWriteBody make(const NormProblem& problem) {
    const NormShape& shape = problem.shape;
    const index_t wanted = ceil_div(shape.positions * shape.position_stride(), kPiece);
    return {problem, shape.rows(),
            std::clamp<index_t>(wanted, 1, std::max<index_t>(shape.positions, 1)),
            Divisor::by(std::max<index_t>(shape.channels, 1))};
  }

  struct Run {
    index_t row, begin, end;  // elements; channels-last, the row of the first
  };

  PYDIST_HD index_t run_length() const {
    return ceil_div(problem.shape.positions, pieces) * problem.shape.position_stride();
  }
  PYDIST_HD index_t rows() const {
    return problem.shape.samples * (kChannelsLast ? 1 : problem.shape.channels) * pieces;
  }
  PYDIST_HD Run row(index_t r) const {
    const index_t positions = problem.shape.positions, stride = problem.shape.position_stride();
    const index_t line = r / pieces, piece = r % pieces, start = line * positions;
    const index_t first = kChannelsLast              ? problem.shape.row(line, 0)
                          : problem.shape.per_sample ? line
                                                     : line % problem.shape.channels;
    return {first, (start + piece * positions / pieces) * stride,
            (start + (piece + 1) * positions / pieces) * stride};
  }

  template <class Loop>
  PYDIST_HD void each(const Run& run, const Loop& loop) const {
    const auto read = [this, run](index_t j) { return read_at(run.begin + j); };
    if constexpr (kChannelsLast) {
      loop(run.end - run.begin,
           launch::Move{read, [this, run](index_t j, const Given& given) {
                          const auto i = static_cast<std::int32_t>(j);
                          const std::int32_t channel = i - channels.quotient(i) * channels.divisor;
                          write(run.begin + j, given, values_of(run.row + channel));
                        }});
    } else {
      const Values values = values_of(run.row);
      loop(run.end - run.begin,
           launch::Move{read, [this, run, values](index_t j, const Given& given) {
                          write(run.begin + j, given, values);
                        }});
    }
  }

 private:
  static constexpr index_t kPiece = 2048;  // approximate elements of a run: 64 per lane of a warp

  // The values of the element's row.
  struct Values {
    T mean, factor, offset, slope, a, b, d;
  };
  PYDIST_HD Values values_of(index_t row) const {
    const T* const values = static_cast<const T*>(problem.values) + row;
    Values found{};
    found.mean = values[0];
    found.factor = values[value_rows];
    found.offset = values[2 * value_rows];
    found.slope =
        kActivation == Activation::kPrelu ? values[3 * value_rows] : static_cast<T>(problem.slope);
    if constexpr (!kForward) {
      const T* const more = static_cast<const T*>(problem.coefficients) + row;
      found.a = more[0];
      found.b = more[value_rows];
      found.d = more[2 * value_rows];
    }
    return found;
  }

  // An element of x and, backward, of the gradient.
  struct Given {
    Storage x[kForward ? 1 : 2];
  };
  PYDIST_HD Given read_at(index_t element) const {
    Given given{};
    given.x[0] = static_cast<const Storage*>(problem.x)[element];
    if constexpr (!kForward) given.x[1] = static_cast<const Storage*>(problem.grad)[element];
    return given;
  }

  PYDIST_HD void write(index_t element, const Given& given, const Values& values) const {
    const T centered = load_as(given.x[0]) - values.mean;
    const T value = normalized(centered, values.factor, values.offset);
    T result;
    if constexpr (kForward) {
      result = activated<kActivation>(value, values.slope);
    } else {
      result =
          values.a * activation_gradient<kActivation>(value, load_as(given.x[1]), values.slope) +
          (values.b * centered + values.d);
    }
    static_cast<Storage*>(problem.out)[element] = store_as<Storage>(result);
  }
};

// Calls f(std::integral_constant<Activation, a>) with the activation of a problem.
template <class F>
void dispatch_activation(const NormProblem& problem, const F& f) {
  if (problem.learned) return f(std::integral_constant<Activation, Activation::kPrelu>{});
  dispatch_rectifier(problem.slope, f);
}

}  // namespace pydist::ops
