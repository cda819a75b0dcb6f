// The inner loops of pooling, with tables per instruction set.
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

// The sources [begin, end) of one sum.
struct PoolSpan {
  std::int64_t begin, end;
};

// `count` pieces of `length` elements, which start `from` elements apart in the sources and `to`
// apart in the targets.
struct PoolRuns {
  std::int64_t count, length, from, to;
};

// Sums of rows: each line of targets is a weighted sum of lines of sources, element by element. For
// 0 <= y < targets, with the span s = spans[y * span_step]:
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
  bool stream;            // write past the caches, if possible; not with `accumulate`
  std::int64_t prefetch;  // elements by which rows except the first are prefetched; 0: none
  T slope;                // of a ReLU
  const To* gate;         // laid out as the targets
};

// Sums of lines out of an array (gather: Storage to T) and into an array (scatter: T to Storage).
template <class Storage, class T>
struct PoolLineIsa {
  // Without a ReLU, with a ReLU, with a leaky one: gather applies it to the rows, scatter
  // multiplies the sums by its derivative at the gate.
  void (*gather[3])(const PoolLines<Storage, T, T>&);
  void (*scatter[3])(const PoolLines<T, Storage, T>&);
};

// Loops along the width, on lines of T.
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
  PoolLineIsa<ops::Float16, float> lines_f16;
  PoolLineIsa<ops::BFloat16, float> lines_bf16;
  PoolLineIsa<float, float> lines_f32;
  PoolLineIsa<double, double> lines_f64;
};

// A tap of pooling windows: its number, and its lanes [begin, end) of a line. Lane 0 reads the
// source at `from`.
struct PoolTap {
  std::int64_t begin, end, number, from;
};

// Maxima of a line: for each tap in order, lane j reads from[base + tap.from + j * step].
template <class Storage, class T, class Number>
struct PoolMaxLine {
  const Storage* from;
  std::int64_t base, step;
  const PoolTap* taps;
  std::int64_t count;
  std::int64_t lanes;  // if all of them have all taps, and step is 1; else 0
  T* best;             // maxima by lane
  Number* numbers;     // their taps, by lane
};

template <class Storage, class T, class Number>
using PoolMaxima = void (*)(const PoolMaxLine<Storage, T, Number>&);

// Maxima over pooling windows; numbers of taps are as wide as the values.
struct PoolMaxTable {
  PoolMaxima<ops::Float16, float, std::int32_t> f16;
  PoolMaxima<ops::BFloat16, float, std::int32_t> bf16;
  PoolMaxima<float, float, std::int32_t> f32;
  PoolMaxima<double, double, std::int64_t> f64;
};

PYDIST_ISA_TABLE(PoolSumTable, kPoolSum)  // isa_sum.cpp
PYDIST_ISA_TABLE(PoolMaxTable, kPoolMax)  // isa_max.cpp

}  // namespace pydist::cpu
