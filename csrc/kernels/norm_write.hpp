// What norms write, on a device: the body that cuda.cuh and emulate.hpp run.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/half.hpp"
#include "kernels/norm.hpp"
#include "launch/run_body.hpp"

namespace pydist::kernels {

// What is written: activations, or dL/dx.
//
// Traffic: reads x (and grad) once, writes out once. Runs are pieces of a channel, whose values
//   stay in registers, or the channels of one position.
// Proof: as of NormSumsBody.
template <bool kForward, bool kChannelsLast, Activation kActivation, class Storage>
struct NormWriteBody {
  using T = accumulator_t<Storage>;
  NormProblem problem;
  index_t pieces;  // of a channel's positions

  static NormWriteBody make(const NormProblem& problem) {
    return {problem, std::max<index_t>(ceil_div(problem.shape.positions, kPiece), 1)};
  }

  struct Run {
    index_t row, begin, end;  // elements
  };

  PYDIST_HD index_t run_length() const {
    return kChannelsLast ? problem.shape.channels : ceil_div(problem.shape.positions, pieces);
  }
  PYDIST_HD index_t rows() const {
    return problem.shape.samples *
           (kChannelsLast ? problem.shape.positions : problem.shape.channels * pieces);
  }
  PYDIST_HD Run row(index_t r) const {
    const index_t channels = problem.shape.channels, positions = problem.shape.positions;
    if constexpr (kChannelsLast) {
      return {problem.shape.row(r / positions, 0), r * channels, (r + 1) * channels};
    } else {
      const index_t line = r / pieces, piece = r % pieces, start = line * positions;
      return {problem.shape.per_sample ? line : line % channels, start + piece * positions / pieces,
              start + (piece + 1) * positions / pieces};
    }
  }

  template <class Loop>
  PYDIST_HD void each(const Run& run, const Loop& loop) const {
    if constexpr (kChannelsLast) {
      loop(run.end - run.begin,
           [this, run](index_t j) { write(run.begin + j, values_of(run.row + j)); });
    } else {
      const Values values = values_of(run.row);
      loop(run.end - run.begin, [this, run, values](index_t j) { write(run.begin + j, values); });
    }
  }

 private:
  static constexpr index_t kPiece = 2048;

  struct Values {
    T mean, factor, offset, slope, a, b, d;
  };
  PYDIST_HD Values values_of(index_t row) const {
    const index_t rows = problem.shape.rows();
    const T* const values = static_cast<const T*>(problem.values) + row;
    Values found{};
    found.mean = values[0];
    found.factor = values[rows];
    found.offset = values[2 * rows];
    found.slope =
        kActivation == Activation::kPrelu ? values[3 * rows] : static_cast<T>(problem.slope);
    if constexpr (!kForward) {
      const T* const more = static_cast<const T*>(problem.coefficients) + row;
      found.a = more[0];
      found.b = more[rows];
      found.d = more[2 * rows];
    }
    return found;
  }

  PYDIST_HD void write(index_t element, const Values& values) const {
    const T centred = load_as(static_cast<const Storage*>(problem.x)[element]) - values.mean;
    const T value = normalized(centred, values.factor, values.offset);
    T result;
    if constexpr (kForward) {
      result = activated<kActivation>(value, values.slope);
    } else {
      const T grad = load_as(static_cast<const Storage*>(problem.grad)[element]);
      result = values.a * activation_gradient<kActivation>(value, grad, values.slope) +
               (values.b * centred + values.d);
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

}  // namespace pydist::kernels
