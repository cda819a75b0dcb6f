// The inner loops of norms, of which there is one table per instruction set.
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

// Elements whose channels repeat every `columns`: element e belongs to column e % columns.
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

// What each kernel takes of a block. Those with an activation are there for each of them.
template <class Storage, class T>
struct NormIsa {
  using Kernel = void (*)(const NormBlock<Storage, T>&);
  int lanes, tile;     // columns that are best a multiple of it
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
