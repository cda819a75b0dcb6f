// The inner loops of sums over pooling windows for one instruction set; see isa/tables.hpp.
//
// sum_lines serves two of the three dims: weighted sums of rows, element by element, so vectors go
// along memory in either layout. The third, the width, has its own loops (split, windows, spans).
// Traffic: each row is read once per target that sums it, from the cache except for the first time;
// targets that are larger than the caches are written past them.
#include <cstdint>
#include <type_traits>

#include "isa/vectors.hpp"
#include "ops/common/activation.hpp"
#include "ops/pool/isa_tables.hpp"

namespace pydist::cpu::PYDIST_ISA_NAME {
namespace {

using ops::Activation;

// Rows that are summed, as in PoolLines.
template <class From, class To, class T>
struct PoolRows {
  const From* from;
  std::int64_t count, row;
  const T* factors;
  std::int64_t row_factor, prefetch;
  bool accumulate, stream;
  T slope;
  const To* gate;  // of the first target
};

// Where a ReLU is applied: nowhere, to the rows before they are summed, or to the sums, by a gate.
enum class ReluAt { kNowhere, kSources, kSums };

// to[x] (=|+=) sum over rows r of factor[r] * row[r][x], 0 <= x < length.
//
// Tiles of kVectors vectors stay in registers during the loop over rows; the rest of the length is
// done by single vectors, then by shorter ones. `rows` is passed by value: otherwise its members
// would be read again after each store.
template <int kVectors, int kLanes, ReluAt kWhere, Activation kActivation, class From, class To,
          class T>
void sum_run(PoolRows<From, To, T> rows, To* to, std::int64_t length) {
  using Vector = typename VectorOf<T, kLanes>::type;
  constexpr bool kCanStream = std::is_same_v<To, T> && kVectors > 1;
  const bool streams =
      rows.stream && reinterpret_cast<std::uintptr_t>(to) % PYDIST_VECTOR_BYTES == 0;
  for (; length >= kVectors * kLanes; length -= kVectors * kLanes) {
    Vector tile[kVectors] = {};
    [[maybe_unused]] const Vector slope = rows.slope - Vector{};
    if (rows.accumulate && kWhere != ReluAt::kSums) {
      for (int v = 0; v < kVectors; ++v) tile[v] = widen<kLanes, T>(to + v * kLanes);
    }
    const From* row = rows.from;
    const T* factor = rows.factors;
    for (std::int64_t r = 0; r < rows.count; ++r, row += rows.row, factor += rows.row_factor) {
      const Vector scale = *factor - Vector{};
      // The hardware prefetches only along the first row, up to the end of its page.
      if (kVectors > 1 && rows.prefetch > 0 && r > 0) {
        for (int v = 0; v < kVectors; ++v) __builtin_prefetch(row + rows.prefetch + v * kLanes);
      }
      for (int v = 0; v < kVectors; ++v) {
        Vector value = widen<kLanes, T>(row + v * kLanes);
        if constexpr (kWhere == ReluAt::kSources) {
          value = ops::activated<kActivation>(value, slope);
        }
        tile[v] += scale * value;
      }
    }
    if constexpr (kWhere == ReluAt::kSums) {
      for (int v = 0; v < kVectors; ++v) {
        const Vector gate = widen<kLanes, T>(rows.gate + v * kLanes);
        tile[v] = ops::activation_gradient<kActivation>(gate, tile[v], slope);
        if (rows.accumulate) tile[v] += widen<kLanes, T>(to + v * kLanes);
      }
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
    if constexpr (kWhere == ReluAt::kSums) rows.gate += kVectors * kLanes;
    to += kVectors * kLanes;
  }
  if constexpr (kVectors * kLanes > 1) {
    if (length > 0) {
      sum_run<1, (kVectors > 1 ? kLanes : kLanes / 2), kWhere, kActivation>(rows, to, length);
    }
  }
}

// All lines of a call. Lines and runs that follow each other without gaps become one long run.
template <ReluAt kWhere, Activation kActivation, class From, class To, class T>
void sum_lines(const PoolLines<From, To, T>& given) {
  PoolLines<From, To, T> lines = given;
  PoolRuns& runs = lines.runs;
  if (runs.from == runs.length && runs.to == runs.length) {  // runs without gaps are one
    runs = {1, runs.count * runs.length, 0, 0};
  }
  // So are lines without gaps, if all of them use the same rows.
  if (runs.count == 1 && lines.span_step == 0 && lines.target_factor == 0 &&
      lines.line == runs.length && lines.target == runs.length) {
    runs.length *= lines.targets;
    lines.targets = 1;
  }
  for (std::int64_t y = 0; y < lines.targets; ++y) {
    const PoolSpan span = lines.spans[y * lines.span_step];
    PoolRows<From, To, T> rows{
        lines.from + y * lines.line + span.begin * lines.row,
        span.end - span.begin,
        lines.row,
        lines.factors + y * lines.target_factor + span.begin * lines.row_factor,
        lines.row_factor,
        lines.prefetch,
        lines.accumulate,
        lines.stream,
        lines.slope,
        lines.gate};
    if constexpr (kWhere == ReluAt::kSums) rows.gate += y * lines.target;
    if (lines.accumulate && rows.count == 0) continue;
    To* to = lines.to + y * lines.target;
    for (std::int64_t r = 0; r < runs.count; ++r, rows.from += runs.from, to += runs.to) {
      sum_run<4, VectorOf<T>::kLanes, kWhere, kActivation>(rows, to, runs.length);
      if constexpr (kWhere == ReluAt::kSums) rows.gate += runs.to;
    }
  }
#if defined(__SSE2__)
  if (lines.stream) _mm_sfence();  // before other threads may read the targets
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

// Windows of stride 1 along a line: lane j adds up to `taps` neighbors from j on. With stride 2, a
// line is split in even and odd elements, `from` and `more`, and windows have stride 1 on each.
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

// kLanes channels of one target: the sum over the positions of a span.
template <int kLanes, class T>
PYDIST_HD void sum_span(const T* from, PoolSpan span, std::int64_t channels, T* sums) {
  using Vector = typename VectorOf<T, kLanes>::type;
  Vector sum = {};
  for (std::int64_t x = span.begin; x < span.end; ++x) {
    sum += *reinterpret_cast<const Vector*>(from + x * channels);
  }
  *reinterpret_cast<Vector*>(sums) = sum;
}

// Channels of each target in vectors of kLanes; the last vector ends where the channels end, and so
// may overlap the one before.
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

// The longest vectors that fit the channels.
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

template <class T>
constexpr PoolWidthIsa<T> pool_width_isa() {
  return {&split<T>, &merge<T>, &windows<T>, &sum_spans<T>, &scale<T>};
}

template <class Storage, class T>
constexpr PoolLineIsa<Storage, T> pool_line_isa() {
  constexpr auto kNone = Activation::kNone, kRelu = Activation::kRelu,
                 kLeaky = Activation::kLeakyRelu;
  constexpr auto kNowhere = ReluAt::kNowhere, kSources = ReluAt::kSources, kSums = ReluAt::kSums;
  return {{&sum_lines<kNowhere, kNone, Storage, T, T>, &sum_lines<kSources, kRelu, Storage, T, T>,
           &sum_lines<kSources, kLeaky, Storage, T, T>},
          {&sum_lines<kNowhere, kNone, T, Storage, T>, &sum_lines<kSums, kRelu, T, Storage, T>,
           &sum_lines<kSums, kLeaky, T, Storage, T>}};
}

}  // namespace

const PoolSumTable kPoolSum = {pool_width_isa<float>(),
                               pool_width_isa<double>(),
                               pool_line_isa<ops::Float16, float>(),
                               pool_line_isa<ops::BFloat16, float>(),
                               pool_line_isa<float, float>(),
                               pool_line_isa<double, double>()};

}  // namespace pydist::cpu::PYDIST_ISA_NAME
