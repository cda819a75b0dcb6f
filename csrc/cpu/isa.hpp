// The inner loops that are compiled once per instruction set, and the table that picks one.
//
// This header is compiled for every instruction set: it must not contain inline functions.
#pragma once

#include <cstdint>

namespace pydist::kernels {
struct Float16;
struct BFloat16;
}  // namespace pydist::kernels

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

inline constexpr int kMaxWgradInputs = 24;

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

// Positions [begin, end) that one sum takes.
struct PoolSpan {
  std::int64_t begin, end;
};

// `count` pieces of `length` elements; how far they are apart on either side.
struct PoolRuns {
  std::int64_t count, length, from, to;
};

// Sums of rows. For 0 <= y < targets, with the span s = spans[y * span_step]:
//   to[y * target] (=|+=) sum over i in s of factors[y * target_factor + i * row_factor] *
//   from[y * line + i * row], where each is a line that consists of `runs`.
template <class From, class To, class T>
struct PoolLines {
  const From* from;
  std::int64_t row, line;
  const PoolSpan* spans;
  std::int64_t span_step;
  const T* factors;
  std::int64_t row_factor, target_factor;
  To* to;
  std::int64_t targets, target;
  PoolRuns runs;
  bool accumulate;
  bool stream;         // write past the caches, where that is possible; not with `accumulate`
  std::int64_t ahead;  // elements by which rows but the first are fetched ahead; 0: not
  T slope;             // of a ReLU
  const To* gate;      // laid out as the targets
};

// Lines between the arrays and the type that sums are formed in.
template <class Storage, class T>
struct PoolLineIsa {
  // With no ReLU, a ReLU, a leaky one: of the rows; and gated, of the sums' gradient.
  void (*gather[3])(const PoolLines<Storage, T, T>&);
  void (*scatter[3])(const PoolLines<T, Storage, T>&);
};

// Along the width, in the type that sums are formed in.
template <class T>
struct PoolWidthIsa {
  // even[j] = from[2 * j], odd[j] = from[2 * j + 1], j < count; and back.
  void (*split)(const T* from, std::int64_t count, T* even, T* odd);
  void (*merge)(const T* even, const T* odd, std::int64_t count, T* to);
  // sums[j] = sum_{k < taps} from[j + k] + sum_{k < more_taps} more[j + k], j < count.
  void (*windows)(const T* from, std::int64_t taps, const T* more, std::int64_t more_taps,
                  std::int64_t count, T* sums);
  // sums[j][c] = sum of from[x][c] over the x in spans[j], c < channels, j < count.
  void (*spans)(const T* from, const PoolSpan* spans, std::int64_t count, std::int64_t channels,
                T* sums);
  // values[j][c] *= factors[j], c < channels, j < count.
  void (*scale)(T* values, const T* factors, std::int64_t count, std::int64_t channels);
};

// Sums over pooling windows.
struct PoolSumTable {
  PoolWidthIsa<float> width_f32;
  PoolWidthIsa<double> width_f64;
  PoolLineIsa<kernels::Float16, float> lines_f16;
  PoolLineIsa<kernels::BFloat16, float> lines_bf16;
  PoolLineIsa<float, float> lines_f32;
  PoolLineIsa<double, double> lines_f64;
};

// A tap of pooling windows, for the lanes [begin, end) of a line: lane 0 is at `from`.
struct PoolTap {
  std::int64_t begin, end, number, from;
};

// Maxima of a line: for each tap in turn, lane j looks at from[base + tap.from + j * step].
template <class Storage, class T, class Number>
struct PoolMaxLine {
  const Storage* from;
  std::int64_t base, step;
  const PoolTap* taps;
  std::int64_t count;
  std::int64_t lanes;  // where all of them have all taps, and step is 1; else 0
  T* best;             // by lane, as are
  Number* numbers;     // the taps that they come from
};

template <class Storage, class T, class Number>
using PoolMaxima = void (*)(const PoolMaxLine<Storage, T, Number>&);

// Maxima over pooling windows; numbers of taps are as wide as the values.
struct PoolMaxTable {
  PoolMaxima<kernels::Float16, float, std::int32_t> f16;
  PoolMaxima<kernels::BFloat16, float, std::int32_t> bf16;
  PoolMaxima<float, float, std::int32_t> f32;
  PoolMaxima<double, double, std::int64_t> f64;
};

// to[j * to_step] = rescaled(from[j * step]), j < count; see kernels/rescaled.hpp.
struct RescaleLine {
  const float* from;
  std::int64_t step;
  float* to;
  std::int64_t to_step, count;
  double lower, upper, shift, scale;
  float divisor;
  bool log;
  std::uint32_t* bad;  // becomes 1 if a result is not finite
};

// From stored numbers to inputs.
struct ConvertTable {
  void (*rescale_f32)(const RescaleLine&);
};

// Elements whose channels repeat every `columns`: element e belongs to column e % columns.
template <class Storage, class T>
struct NormBlock {
  const Storage *x, *grad;
  Storage* out;
  std::int64_t elements, columns;
  const T *mean, *factor, *offset;  // [columns], as are the others; see kernels/norm.hpp
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
  NormIsa<kernels::Float16, float> f16;
  NormIsa<kernels::BFloat16, float> bf16;
  NormIsa<float, float> f32;
  NormIsa<double, double> f64;
};

struct Isa {
  const char* name;  // "base", "x86_64_v3" or "x86_64_v4"
  ConvIsa<float> conv_f32;
  ConvIsa<double> conv_f64;
  // out[j] = uniform(counter first + j), j < count; see kernels/philox.hpp.
  void (*uniform_f32)(float* out, std::int64_t count, std::uint64_t key, std::uint64_t first);
  void (*uniform_f64)(double* out, std::int64_t count, std::uint64_t key, std::uint64_t first);
  const PoolSumTable* pool_sum;
  const PoolMaxTable* pool_max;
  const ConvertTable* convert;
  const NormTable* norm;
  const WgradTable* wgrad;
};

// The best one that this CPU has; PYDIST_ISA=base|x86_64_v3|x86_64_v4 in the environment lowers it.
//
// Throws UsageError if PYDIST_ISA is none of these: commands and pydist.init() call it before any
// thread of a kernel does.
const Isa& isa();

}  // namespace pydist::cpu
