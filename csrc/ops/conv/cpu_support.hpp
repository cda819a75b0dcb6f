// Code shared by the CPU's forward, dgrad and wgrad: tiles by size, and loops over weights.
#pragma once

#include <type_traits>

#include "isa/isa.hpp"
#include "ops/conv/isa_tables.hpp"
#include "ops/conv/problem.hpp"

namespace pydist::cpu {

// The inner loops for the accumulator type T, float or double, of the instruction set in use.
template <class T>
const ConvIsa<T>& conv_isa() {
  const ConvTable& table = isa::chosen(PYDIST_ISA_TABLES(kConv));
  if constexpr (std::is_same_v<T, float>) {
    return table.f32;
  } else {
    return table.f64;
  }
}

// log2 of the rows of the largest tile of this instruction set with at most `rows` rows, which are
// at least 1. Tiles have 1, 2, 4 or 8 rows; every instruction set has those with one row.
template <class T>
int conv_rows(const ConvIsa<T>& isa, index_t rows) {
  int log_rows = 3;
  while ((1 << log_rows) > rows || isa.conv[log_rows][0] == nullptr) --log_rows;
  return log_rows;
}

// Elements of the weight, of all groups.
inline index_t weight_elements(const ops::ConvProblem& problem) {
  index_t count = problem.groups * problem.out_channels * problem.in_channels;
  for (const ops::ConvDim& dim : problem.dims) count *= dim.kernel;
  return count;
}

// The problem with its weight replaced by a contiguous array, in C order, that has no memory yet:
// the caller allocates weight_elements if it needs them. Forward and dgrad widen weights of half
// types into such an array, once before they are used many times (visit_weight). Wgrad uses only
// its strides: an offset is then the C-order number of a weight.
inline ops::ConvProblem with_contiguous_weight(ops::ConvProblem problem) {
  index_t stride = 1;
  problem.weight.data = nullptr;
  for (int dim = ops::kSpatialDims - 1; dim >= 0; --dim) {
    problem.weight.strides[2 + dim] = stride;
    stride *= problem.dims[dim].kernel;
  }
  problem.weight.strides[1] = stride;
  problem.weight.strides[0] = stride * problem.in_channels;
  return problem;
}

// Calls f(i, offset) for every weight, in C order: its C-order index and its offset under
// `strides`, in elements. `strides`: of out, in / groups, and the three kernel dims.
template <class F>
void visit_weight(const ops::ConvProblem& problem, const index_t* strides, F&& f) {
  index_t i = 0;
  for (index_t co = 0; co < problem.groups * problem.out_channels; ++co) {
    for (index_t ci = 0; ci < problem.in_channels; ++ci) {
      for (index_t z = 0; z < problem.dims[0].kernel; ++z) {
        for (index_t y = 0; y < problem.dims[1].kernel; ++y) {
          for (index_t x = 0; x < problem.dims[2].kernel; ++x) {
            f(i++,
              co * strides[0] + ci * strides[1] + z * strides[2] + y * strides[3] + x * strides[4]);
          }
        }
      }
    }
  }
}

}  // namespace pydist::cpu
