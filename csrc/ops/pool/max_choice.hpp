// The gradient of maxima over windows that have no input in common, and the choice of the body.
#pragma once

#include <cstdint>
#include <type_traits>

#include "launch/run_body.hpp"
#include "ops/common/half.hpp"
#include "ops/common/vector.hpp"
#include "ops/pool/max_body.hpp"
#include "ops/pool/windows.hpp"

namespace pydist::ops {

// Backward where no input is in two windows. Reads each gradient and its tap once, where MaxBody
// reads them for every input of the window.
//
// Index formula: in[i] = out[o] if the tap of o is i, else 0, for the inputs i of the cell of o:
//   o * stride + base <= i < (o + 1) * stride + base, along each dim. Cells cover all inputs: there
//   is also one for each o outside the array of outputs whose cell has inputs in the array.
// Threads: as in PoolLanes, over cells; a lane writes the inputs of a cell, N channels at a time.
// Traffic: reads each gradient and tap once, writes each input once.
// Proof, CPU code: as of MaxBody.
template <class Storage, class Tap, int N>
struct MaxScatterBody {
  static constexpr int kRunBlocks = 3;  // as in MaxBody
  using T = accumulator_t<Storage>;
  using Position = PoolLanes::Position;
  BasicPoolDim<std::int32_t> dims[kSpatialDims];
  PoolLanes lanes;             // over cells: positions are numbers of outputs, below 0 included
  SpatialArray in, out, taps;  // `in` is the gradient that is written

  // The problem must have disjoint windows.
  static MaxScatterBody make(const MaxProblem& problem) {
    MaxScatterBody body{};
    body.in = problem.in;
    body.out = problem.out;
    body.taps = problem.taps;
    Span cells[kSpatialDims]{};  // none without inputs
    for (int dim = 0; dim < kSpatialDims; ++dim) {
      const PoolDim& along = problem.dims[dim];
      body.dims[dim] = shorten(along);
      if (along.in_extent == 0) continue;
      cells[dim] = {floor_div(-along.base, along.stride),
                    floor_div(along.in_extent - 1 - along.base, along.stride) + 1};
    }
    body.lanes = PoolLanes::make(problem.batch, problem.channels, cells, problem.in, N);
    return body;
  }

  PYDIST_HD index_t run_length() const { return lanes.run_length(); }
  PYDIST_HD index_t rows() const { return lanes.row_count; }
  PYDIST_HD Position row(index_t r) const { return lanes.position(r); }

  template <class Loop>
  PYDIST_HD void each(const Position& run, const Loop& loop) const {
    const bool held = holds(0, run.z) && holds(1, run.y);
    const Position line{run.sample, run.channel, run.z, run.y, 0};
    const index_t grads = offset_of(out, line), numbers = offset_of(taps, line);
    const Cell depth = cell(0, run.z), height = cell(1, run.y);
    Storage* const target = element_at<Storage>(
        in, {run.sample, run.channel, depth.first + depth.begin, height.first + height.begin, 0});
    loop(run_length(),
         launch::Move{[=, this](index_t j) {
                        const auto [x, channel] = lanes.piece(j);
                        if (!held || !holds(2, x)) return Given::none();
                        return Given{
                            Vector<Storage, N>::load(static_cast<const Storage*>(out.data) + grads +
                                                     channel * out.strides[1] + x * out.strides[4]),
                            Vector<Tap, N>::load(static_cast<const Tap*>(taps.data) + numbers +
                                                 channel * taps.strides[1] + x * taps.strides[4])};
                      },
                      [=, this](index_t j, const Given& given) {
                        const auto [x, channel] = lanes.piece(j);
                        scatter(given, depth, height, cell(2, x), target + channel * in.strides[1]);
                      }});
  }

 private:
  // The gradients and taps of the outputs of a lane.
  struct Given {
    Vector<Storage, N> grads;
    Vector<Tap, N> taps;

    static PYDIST_HD Given none() {
      Given given{};
      PYDIST_UNROLLED
      for (int e = 0; e < N; ++e) given.taps.element[e] = kNoTap<Tap>;
      return given;
    }
  };

  // The inputs first + k of a cell, begin <= k < end: those inside the array.
  struct Cell {
    std::int32_t first, begin, end;
  };
  PYDIST_HD Cell cell(int dim, std::int32_t o) const {
    const BasicPoolDim<std::int32_t>& along = dims[dim];
    const std::int32_t first = o * along.stride + along.base, left = along.in_extent - first;
    return {first, first < 0 ? -first : 0, left < along.stride ? left : along.stride};
  }
  // Whether the array of outputs has number o; other cells have a gradient of 0.
  PYDIST_HD bool holds(int dim, std::int32_t o) const { return o >= 0 && o < dims[dim].out_extent; }

  static PYDIST_HD index_t offset_of(const SpatialArray& array, const Position& at) {
    return at.sample * array.strides[0] + at.channel * array.strides[1] + at.z * array.strides[2] +
           at.y * array.strides[3];
  }

  // Writes all inputs of a cell: the gradient where the tap is, else 0. Inputs between two windows
  // (stride above the kernel) have no tap's number. `plane`: the cell's first input along depth and
  // height, at the width's index 0.
  PYDIST_HD void scatter(const Given& given, const Cell& depth, const Cell& height,
                         const Cell& width, Storage* plane) const {
    Vector<Storage, N> values;
    PYDIST_UNROLLED
    for (int e = 0; e < N; ++e) {  // the sum of one term, as in MaxBody: of -0 it is 0
      values.element[e] = store_as<Storage>(T{} + load_as(given.grads.element[e]));
    }
    plane += (width.first + width.begin) * in.strides[4];
    PYDIST_ROLLED
    for (std::int32_t i = depth.begin; i < depth.end; ++i, plane += in.strides[2]) {
      Storage* line = plane;
      PYDIST_ROLLED
      for (std::int32_t j = height.begin; j < height.end; ++j, line += in.strides[3]) {
        Storage* to = line;
        const bool in_window = i < dims[0].kernel && j < dims[1].kernel;
        PYDIST_ROLLED
        for (std::int32_t k = width.begin; k < width.end; ++k, to += in.strides[4]) {
          const std::int32_t number = in_window && k < dims[2].kernel
                                          ? (i * dims[1].kernel + j) * dims[2].kernel + k
                                          : -1;  // no tap's
          Vector<Storage, N> taken;
          PYDIST_UNROLLED
          for (int e = 0; e < N; ++e) {
            taken.element[e] = given.taps.element[e] == number ? values.element[e] : Storage{};
          }
          taken.store(to);
        }
      }
    }
  }
};

// Calls f(body) with the body for a problem: of vectors if all arrays can be accessed so, and
// backward the scatter if windows are disjoint. Storage and Tap are the problem's types. Pick has
// no vectors: adjacent channels have different taps, so their inputs are not adjacent.
template <MaxOp kOp, class Storage, class Tap, class F>
void with_max_body(const MaxProblem& problem, const F& f) {
  const auto with = [&]<int N>(std::integral_constant<int, N>) {
    if constexpr (kOp == MaxOp::kBackward) {
      if (problem.has_disjoint_windows()) {
        return f(MaxScatterBody<Storage, Tap, N>::make(problem));
      }
    }
    f(MaxBody<kOp, Storage, Tap, N>::make(problem));
  };
  constexpr int kWide = kOp == MaxOp::kPick ? 1 : kVectorElements<Storage>;
  if (problem.has_vectors(kWide, sizeof(Storage), sizeof(Tap))) {
    with(std::integral_constant<int, kWide>{});
  } else {
    with(std::integral_constant<int, 1>{});
  }
}

}  // namespace pydist::ops
