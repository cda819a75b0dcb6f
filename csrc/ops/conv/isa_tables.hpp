// The inner loops of boundary convolutions, with tables per instruction set.
//
// Compiled for every instruction set: it must not contain inline functions (isa/tables.hpp).
#pragma once

#include <cstdint>

#include "isa/tables.hpp"

namespace pydist::cpu {

// An outer-product tile: sums[m][x] = sum over channels c and taps t of
//   weight[m * weight_row + c * weight_channel + weight_offset[t]]
//   * src[c * src_channel + source_offset[t] + x],   0 <= x < vectors * lanes.
// It reads full vectors: the caller provides memory past the last position.
template <class T>
struct ConvTile {
  const T* src;
  const T* weight;
  std::int64_t src_channel, weight_channel, weight_row;
  const std::int64_t* source_offset;
  const std::int64_t* weight_offset;
  std::int64_t taps, channels;
  T* sums;  // [rows][vectors * lanes], aligned to a vector
};

// An inner-product tile: sums[m][j] = sum_x left[m * left_row + x] * right[j][x], 0 <= x < vectors
// * lanes.
template <class T>
struct DotTile {
  const T* left;
  std::int64_t left_row;
  const T* const* right;
  std::int64_t vectors;
  T* sums;  // [rows][columns]
};

// Tiles of one type, by size: the largest ones fill the registers.
template <class T>
struct ConvIsa {
  int lanes;         // elements of a vector
  int conv_vectors;  // largest tiles
  int dot_rows, dot_columns;
  // [log2(rows)][vectors - 1]; rows 1, 2, 4, 8 and vectors 1, 2, 3.
  void (*conv[4][3])(const ConvTile<T>&);
  // [rows - 1][columns - 1]
  void (*dot[4][6])(const DotTile<T>&);
};

struct ConvTable {
  ConvIsa<float> f32;
  ConvIsa<double> f64;
};

inline constexpr int kMaxWgradInputs = 24;

// Products along a row of positions j, with sums in registers:
// sums[r * sum_run + i * sum_step + lane] += sum over j < count of
//   in[r * in_run + j * in_step + i] * grad[j * grad_step + lane].
template <class T>
struct WgradRow {
  const T* in;
  const T* grad;
  std::int64_t in_run, in_step, grad_step, count;
  T* sums;
  std::int64_t sum_run, sum_step;
};

template <class T>
struct WgradIsa {
  int lanes;                                                   // of a vector
  int inputs;                                                  // at most, of all runs of a call
  void (*add[kMaxWgradInputs])(const WgradRow<T>&);            // one run; [inputs - 1]
  void (*add_three[kMaxWgradInputs / 3])(const WgradRow<T>&);  // [inputs of each - 1]
};

struct WgradTable {
  WgradIsa<float> f32;
  WgradIsa<double> f64;
};

PYDIST_ISA_TABLE(ConvTable, kConv)    // isa_tiles.cpp
PYDIST_ISA_TABLE(WgradTable, kWgrad)  // isa_wgrad.cpp

}  // namespace pydist::cpu
