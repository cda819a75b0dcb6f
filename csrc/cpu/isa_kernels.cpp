// Inner loops for one instruction set. CMake compiles this file several times, with -march and
// PYDIST_ISA_NAME (a namespace) set; everything in here has to stay inside that namespace.
#include <type_traits>

#include "cpu/isa_vectors.hpp"
#include "kernels/philox.hpp"
#include "launch/host_device.hpp"

namespace pydist::cpu::PYDIST_ISA_NAME {
namespace {

// Outer products: kRows x kVectors accumulators stay in registers, one load a vector and one
// broadcast a row for kRows * kVectors multiply-adds.
template <class T, int kRows, int kVectors>
void conv_tile(const ConvTile<T>& tile) {
  using Vector = typename VectorOf<T>::type;
  constexpr int kLanes = VectorOf<T>::kLanes;
  Vector sums[kRows][kVectors] = {};
  for (std::int64_t c = 0; c < tile.channels; ++c) {
    const T* const src = tile.src + c * tile.src_channel;
    const T* const weight = tile.weight + c * tile.weight_channel;
    for (std::int64_t t = 0; t < tile.taps; ++t) {
      const T* const x = src + tile.source_offset[t];
      const T* const w = weight + tile.weight_offset[t];
      Vector values[kVectors];
      for (int v = 0; v < kVectors; ++v) values[v] = load(x + v * kLanes);
      for (int m = 0; m < kRows; ++m) {
        const Vector factor = w[m * tile.weight_row] - Vector{};
        for (int v = 0; v < kVectors; ++v) sums[m][v] += factor * values[v];
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kVectors; ++v) {
      *reinterpret_cast<Vector*>(tile.sums + (m * kVectors + v) * kLanes) = sums[m][v];
    }
  }
}

// Inner products, with a vector of partial sums each; lanes are added in pairs at the end.
template <class T, int kRows, int kColumns>
void dot_tile(const DotTile<T>& tile) {
  using Vector = typename VectorOf<T>::type;
  constexpr int kLanes = VectorOf<T>::kLanes;
  Vector sums[kRows][kColumns] = {};
  const T* right[kColumns];
  for (int j = 0; j < kColumns; ++j) right[j] = tile.right[j];
  for (std::int64_t x = 0; x < tile.vectors * kLanes; x += kLanes) {
    Vector left[kRows];
    for (int m = 0; m < kRows; ++m) left[m] = load(tile.left + m * tile.left_row + x);
    for (int j = 0; j < kColumns; ++j) {
      const Vector value = load(right[j] + x);
      for (int m = 0; m < kRows; ++m) sums[m][j] += left[m] * value;
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int j = 0; j < kColumns; ++j) {
      T lanes[kLanes];
      *reinterpret_cast<Vector*>(lanes) = sums[m][j];
      for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
      }
      tile.sums[m * kColumns + j] = lanes[0];
    }
  }
}

template <class T>
void fill_uniform(T* out, std::int64_t count, std::uint64_t key, std::uint64_t first) {
  PYDIST_INDEPENDENT
  for (std::int64_t j = 0; j < count; ++j) {
    out[j] = kernels::uniform<T>(key, first + static_cast<std::uint64_t>(j));
  }
}

// Rows that are summed, as in PoolLines.
template <class From, class T>
struct PoolRows {
  const From* from;
  std::int64_t count, row;
  const T* factors;
  std::int64_t row_factor, ahead;
  bool accumulate, stream;
};

// to[x] (=|+=) the rows' sum: tiles of kVectors vectors, then single vectors, then shorter ones.
// `rows` by value, or its members would be read again after each store.
template <int kVectors, int kLanes, class From, class To, class T>
void sum_run(PoolRows<From, T> rows, To* to, std::int64_t length) {
  using Vector = typename VectorOf<T, kLanes>::type;
  constexpr bool kCanStream = std::is_same_v<To, T> && kVectors > 1;
  const bool streams =
      rows.stream && reinterpret_cast<std::uintptr_t>(to) % PYDIST_VECTOR_BYTES == 0;
  for (; length >= kVectors * kLanes; length -= kVectors * kLanes) {
    Vector tile[kVectors] = {};
    if (rows.accumulate) {
      for (int v = 0; v < kVectors; ++v) tile[v] = widen<kLanes, T>(to + v * kLanes);
    }
    const From* row = rows.from;
    const T* factor = rows.factors;
    for (std::int64_t r = 0; r < rows.count; ++r, row += rows.row, factor += rows.row_factor) {
      const Vector scale = *factor - Vector{};
      if (kVectors > 1 && rows.ahead > 0 && r > 0) {
        for (int v = 0; v < kVectors; ++v) __builtin_prefetch(row + rows.ahead + v * kLanes);
      }
      for (int v = 0; v < kVectors; ++v) tile[v] += scale * widen<kLanes, T>(row + v * kLanes);
    }
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kCanStream) {
        if (streams) {
          stream<T>(tile[v], to + v * kLanes);
          continue;
        }
      }
      narrow<kLanes, T>(tile[v], to + v * kLanes);
    }
    rows.from += kVectors * kLanes;
    to += kVectors * kLanes;
  }
  if constexpr (kVectors * kLanes > 1) {
    if (length > 0) sum_run<1, (kVectors > 1 ? kLanes : kLanes / 2)>(rows, to, length);
  }
}

template <class From, class To, class T>
void sum_lines(const PoolLines<From, To, T>& given) {
  PoolLines<From, To, T> lines = given;
  PoolRuns& runs = lines.runs;
  if (runs.from == runs.length && runs.to == runs.length) {  // runs without gaps are one
    runs = {1, runs.count * runs.length, 0, 0};
  }
  // So are lines without gaps, if all of them take the same rows.
  if (runs.count == 1 && lines.span_step == 0 && lines.target_factor == 0 &&
      lines.line == runs.length && lines.target == runs.length) {
    runs.length *= lines.targets;
    lines.targets = 1;
  }
  for (std::int64_t y = 0; y < lines.targets; ++y) {
    const PoolSpan span = lines.spans[y * lines.span_step];
    PoolRows<From, T> rows{lines.from + y * lines.line + span.begin * lines.row,
                           span.end - span.begin,
                           lines.row,
                           lines.factors + y * lines.target_factor + span.begin * lines.row_factor,
                           lines.row_factor,
                           lines.ahead,
                           lines.accumulate,
                           lines.stream};
    if (lines.accumulate && rows.count == 0) continue;
    To* to = lines.to + y * lines.target;
    for (std::int64_t r = 0; r < runs.count; ++r, rows.from += runs.from, to += runs.to) {
      sum_run<4, VectorOf<T>::kLanes>(rows, to, runs.length);
    }
  }
#if defined(__SSE2__)
  if (lines.stream) _mm_sfence();  // before other threads are told that the targets are there
#endif
}

template <class T>
void split(const T* from, std::int64_t count, T* even, T* odd) {
  PYDIST_INDEPENDENT
  for (std::int64_t j = 0; j < count; ++j) {
    even[j] = from[2 * j];
    odd[j] = from[2 * j + 1];
  }
}

template <class T>
void merge(const T* even, const T* odd, std::int64_t count, T* to) {
  PYDIST_INDEPENDENT
  for (std::int64_t j = 0; j < count; ++j) {
    to[2 * j] = even[j];
    to[2 * j + 1] = odd[j];
  }
}

template <class T>
void windows(const T* from, std::int64_t taps, const T* more, std::int64_t more_taps,
             std::int64_t count, T* sums) {
  using Vector = typename VectorOf<T>::type;
  constexpr int kLanes = VectorOf<T>::kLanes;
  std::int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    Vector sum = {};
    for (std::int64_t k = 0; k < taps; ++k) sum += load(from + j + k);
    for (std::int64_t k = 0; k < more_taps; ++k) sum += load(more + j + k);
    *reinterpret_cast<Vector*>(sums + j) = sum;
  }
  for (; j < count; ++j) {
    T sum{};
    for (std::int64_t k = 0; k < taps; ++k) sum += from[j + k];
    for (std::int64_t k = 0; k < more_taps; ++k) sum += more[j + k];
    sums[j] = sum;
  }
}

template <int kLanes, class T>
PYDIST_HD void sum_span(const T* from, PoolSpan span, std::int64_t channels, T* sums) {
  using Vector = typename VectorOf<T, kLanes>::type;
  Vector sum = {};
  for (std::int64_t x = span.begin; x < span.end; ++x) {
    sum += *reinterpret_cast<const Vector*>(from + x * channels);
  }
  *reinterpret_cast<Vector*>(sums) = sum;
}

// In vectors that are no longer than the channels; the last one ends where they end.
template <int kLanes, class T>
PYDIST_HD void sum_spans_by(const T* from, const PoolSpan* spans, std::int64_t count,
                            std::int64_t channels, T* sums) {
  const std::int64_t last = channels - kLanes;
  for (std::int64_t j = 0; j < count; ++j) {
    T* const to = sums + j * channels;
    for (std::int64_t c = 0; c < last; c += kLanes) {
      sum_span<kLanes>(from + c, spans[j], channels, to + c);
    }
    sum_span<kLanes>(from + last, spans[j], channels, to + last);
  }
}

template <class T>
void sum_spans(const T* from, const PoolSpan* spans, std::int64_t count, std::int64_t channels,
               T* sums) {
  constexpr int kLanes = VectorOf<T>::kLanes;
  if (channels >= kLanes) {
    sum_spans_by<kLanes>(from, spans, count, channels, sums);
  } else if (kLanes > 8 && channels >= 8) {
    sum_spans_by<8>(from, spans, count, channels, sums);
  } else if (kLanes > 4 && channels >= 4) {
    sum_spans_by<4>(from, spans, count, channels, sums);
  } else if (kLanes > 2 && channels >= 2) {
    sum_spans_by<2>(from, spans, count, channels, sums);
  } else {
    sum_spans_by<1>(from, spans, count, channels, sums);
  }
}

template <class T>
void scale(T* values, const T* factors, std::int64_t count, std::int64_t channels) {
  if (channels == 1) {
    PYDIST_INDEPENDENT
    for (std::int64_t j = 0; j < count; ++j) values[j] *= factors[j];
    return;
  }
  for (std::int64_t j = 0; j < count; ++j) {
    T* const value = values + j * channels;
    PYDIST_INDEPENDENT
    for (std::int64_t c = 0; c < channels; ++c) value[c] *= factors[j];
  }
}

// Tiles fill the register file: 24 accumulators of 32, 12 of 16, fewer without multiply-add, where
// products need registers too.
#if defined(__x86_64__) && !defined(__FMA__)
constexpr int kConvVectors = 2;
#else
constexpr int kConvVectors = 3;
#endif
constexpr int kDotRows = 4;
constexpr int kDotColumns = PYDIST_VECTOR_BYTES == 64 ? 6 : 3;

template <class T, int kRows>
constexpr void add_dot_row(ConvIsa<T>& isa) {
  isa.dot[kRows - 1][0] = &dot_tile<T, kRows, 1>;
  isa.dot[kRows - 1][1] = &dot_tile<T, kRows, 2>;
  isa.dot[kRows - 1][2] = &dot_tile<T, kRows, 3>;
  if constexpr (kDotColumns > 3) {
    isa.dot[kRows - 1][3] = &dot_tile<T, kRows, 4>;
    isa.dot[kRows - 1][4] = &dot_tile<T, kRows, 5>;
    isa.dot[kRows - 1][5] = &dot_tile<T, kRows, 6>;
  }
}

template <class T, int kLogRows>
constexpr void add_conv_row(ConvIsa<T>& isa) {
  isa.conv[kLogRows][0] = &conv_tile<T, 1 << kLogRows, 1>;
  isa.conv[kLogRows][1] = &conv_tile<T, 1 << kLogRows, 2>;
  isa.conv[kLogRows][2] = &conv_tile<T, 1 << kLogRows, 3>;
}

template <class T>
constexpr ConvIsa<T> conv_isa() {
  ConvIsa<T> isa{VectorOf<T>::kLanes, kConvVectors, kDotRows, kDotColumns, {}, {}};
  add_conv_row<T, 0>(isa);
  add_conv_row<T, 1>(isa);
  add_conv_row<T, 2>(isa);
  if constexpr (PYDIST_VECTOR_BYTES == 64) add_conv_row<T, 3>(isa);
  add_dot_row<T, 1>(isa);
  add_dot_row<T, 2>(isa);
  add_dot_row<T, 3>(isa);
  add_dot_row<T, 4>(isa);
  return isa;
}

template <class T>
constexpr PoolWidthIsa<T> pool_width_isa() {
  return {&split<T>, &merge<T>, &windows<T>, &sum_spans<T>, &scale<T>};
}

template <class Storage, class T>
constexpr PoolLineIsa<Storage, T> pool_line_isa() {
  return {&sum_lines<Storage, T, T>, &sum_lines<T, Storage, T>};
}

#define PYDIST_STRING(name) #name
#define PYDIST_STRING_OF(name) PYDIST_STRING(name)

}  // namespace

extern const PoolMaxTable kPoolMax;  // isa_pool_max.cpp
extern const ConvertTable kConvert;  // isa_convert.cpp
extern const NormTable kNorm;        // isa_norm.cpp
extern const WgradTable kWgrad;      // isa_wgrad.cpp

extern const Isa kIsa;
const Isa kIsa = {PYDIST_STRING_OF(PYDIST_ISA_NAME),
                  conv_isa<float>(),
                  conv_isa<double>(),
                  &fill_uniform<float>,
                  &fill_uniform<double>,
                  pool_width_isa<float>(),
                  pool_width_isa<double>(),
                  pool_line_isa<kernels::Float16, float>(),
                  pool_line_isa<kernels::BFloat16, float>(),
                  pool_line_isa<float, float>(),
                  pool_line_isa<double, double>(),
                  &kPoolMax,
                  &kConvert,
                  &kNorm,
                  &kWgrad};

}  // namespace pydist::cpu::PYDIST_ISA_NAME
