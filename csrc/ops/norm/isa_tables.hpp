// The inner loops of norms, with a table per instruction set.
//
// Compiled for every instruction set: it must not contain inline functions (isa/tables.hpp).
#pragma once

#include <cstdint>

#include "isa/tables.hpp"

namespace pydist::ops {
struct Float16;
struct BFloat16;
}  // namespace pydist::ops

namespace pydist::cpu {

// Consecutive elements in memory as a matrix with rows of `columns`: element e belongs to column
// e % columns. The values of columns (mean, factor, ...) are arrays of that length, so one loop
// serves all layouts: for channels-last arrays a column is a channel, repeated to a multiple of the
// vector length; else all columns belong to one channel.
template <class Storage, class T>
struct NormBlock {
  const Storage *x, *grad;
  Storage* out;
  std::int64_t elements, columns;
  const T *mean, *factor, *offset;  // [columns], as are the others; see problem.hpp
  const T *a, *b, *d;
  const T* slopes;  // learned ones; else
  T slope;
  T *first, *second, *third;  // sums of the columns
};

// The loops over a block, and the members that each of them writes. Index of the arrays:
// Activation.
template <class Storage, class T>
struct NormIsa {
  using Kernel = void (*)(const NormBlock<Storage, T>&);
  int lanes, tile;     // columns are best a multiple of `tile`
  Kernel total;        // first = sum x
  Kernel moments;      // first = sum x - mean, second = sum (x - mean)^2
  Kernel apply[4];     // out
  Kernel sums[4];      // first = sum g, second = sum g (x - mean), third = sum of the slopes' part
  Kernel gradient[4];  // out
};

struct NormTable {
  NormIsa<ops::Float16, float> f16;
  NormIsa<ops::BFloat16, float> bf16;
  NormIsa<float, float> f32;
  NormIsa<double, double> f64;
};

PYDIST_ISA_TABLE(NormTable, kNorm)  // isa_passes.cpp

}  // namespace pydist::cpu
