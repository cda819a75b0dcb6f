// The inner loops that are compiled once per instruction set, and the table that picks one.
//
// This header is compiled for every instruction set: it must not contain inline functions.
#pragma once

#include <cstdint>

namespace pydist::cpu {

// sums[m][x] = sum over channels c and taps t of
//   weight[m * weight_row + c * weight_channel + weight_offset[t]] * src[c * src_channel +
//   source_offset[t] + x], 0 <= x < vectors * lanes. Reads past the last position are the caller's.
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

// sums[m][j] = sum_x left[m * left_row + x] * right[j][x], 0 <= x < vectors * lanes.
template <class T>
struct DotTile {
  const T* left;
  std::int64_t left_row;
  const T* const* right;
  std::int64_t vectors;
  T* sums;  // [rows][columns]
};

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

struct Isa {
  const char* name;  // "base", "x86_64_v3" or "x86_64_v4"
  ConvIsa<float> conv_f32;
  ConvIsa<double> conv_f64;
  // out[j] = uniform(counter first + j), j < count; see kernels/philox.hpp.
  void (*uniform_f32)(float* out, std::int64_t count, std::uint64_t key, std::uint64_t first);
  void (*uniform_f64)(double* out, std::int64_t count, std::uint64_t key, std::uint64_t first);
};

// The best one that this CPU has; PYDIST_ISA=base|x86-64-v3|x86-64-v4 in the environment lowers it.
const Isa& isa();

}  // namespace pydist::cpu
