// The inner loop of maxima over pooling windows for one instruction set; see isa/tables.hpp.
//
// Lanes are targets, and taps are visited in order. If all lanes have all taps and are adjacent,
// tiles of maxima stay in registers during the loop over taps (tile); else each tap is applied to
// all its lanes (by_taps), and maxima stay in the cache.
#include <cstdint>
#include <type_traits>

#include "launch/host_device.hpp"
#include "ops/common/half.hpp"
#include "ops/pool/isa_tables.hpp"

#if defined(__AVX512F__)
#define PYDIST_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define PYDIST_VECTOR_BYTES 32
#else
#define PYDIST_VECTOR_BYTES 16
#endif

namespace pydist::cpu::PYDIST_ISA_NAME {
namespace {

template <class T, int kLanes>
struct Lanes {
  // Unaligned loads and stores through this type are allowed.
  typedef T type __attribute__((vector_size(kLanes * sizeof(T)), aligned(sizeof(T)), may_alias));
};

// Maxima of kVectors vectors stay in registers during the loop over taps. A value is taken if it is
// greater or NaN, so the first of equal values stays, and the last of NaNs: torch's rule, as taps
// are visited in order.
template <int kVectors, int kLanes, class Storage, class T, class Number>
PYDIST_HD void tile(const PoolMaxLine<Storage, T, Number>& line, std::int64_t lane) {
  using Values = typename Lanes<T, kLanes>::type;
  using Numbers = typename Lanes<Number, kLanes>::type;
  Values best[kVectors];
  Numbers numbers[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    best[v] = *reinterpret_cast<const Values*>(line.best + lane + v * kLanes);
    numbers[v] = *reinterpret_cast<const Numbers*>(line.numbers + lane + v * kLanes);
  }
  for (std::int64_t t = 0; t < line.count; ++t) {
    const Storage* const row = line.from + (line.base + line.taps[t].from + lane);
    const Numbers number = static_cast<Number>(line.taps[t].number) - Numbers{};
    for (int v = 0; v < kVectors; ++v) {
      Values value{};
      if constexpr (std::is_same_v<Storage, T>) {
        value = *reinterpret_cast<const Values*>(row + v * kLanes);
      } else {
        for (int l = 0; l < kLanes; ++l) value[l] = ops::load_as(row[v * kLanes + l]);
      }
      const auto takes = (value > best[v]) | (value != value);
      best[v] = takes ? value : best[v];
      numbers[v] = takes ? number : numbers[v];
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    *reinterpret_cast<Values*>(line.best + lane + v * kLanes) = best[v];
    *reinterpret_cast<Numbers*>(line.numbers + lane + v * kLanes) = numbers[v];
  }
}

// From `lane` on, in vectors of kLanes, then of half as many.
template <int kLanes, class Storage, class T, class Number>
PYDIST_HD void tiles(const PoolMaxLine<Storage, T, Number>& line, std::int64_t lane) {
  if constexpr (kLanes * sizeof(T) == PYDIST_VECTOR_BYTES) {
    for (; lane + 2 * kLanes <= line.lanes; lane += 2 * kLanes) tile<2, kLanes>(line, lane);
  }
  for (; lane + kLanes <= line.lanes; lane += kLanes) tile<1, kLanes>(line, lane);
  if constexpr (kLanes > 1) tiles<kLanes / 2>(line, lane);
}

// One tap after the other, along the lanes that have it. Steps between lanes are arbitrary.
template <class Storage, class T, class Number, class Step>
PYDIST_HD void by_taps(const PoolMaxLine<Storage, T, Number>& line, Step step) {
  for (std::int64_t t = 0; t < line.count; ++t) {
    const PoolTap& tap = line.taps[t];
    const Storage* __restrict const from = line.from + (line.base + tap.from);
    T* __restrict const best = line.best;
    Number* __restrict const numbers = line.numbers;
    const auto number = static_cast<Number>(tap.number);
    const std::int64_t end = tap.end;
    PYDIST_INDEPENDENT
    for (std::int64_t j = tap.begin; j < end; ++j) {
      const T value = ops::load_as(from[j * step]);
      const bool takes = (value > best[j]) | (value != value);
      best[j] = takes ? value : best[j];
      numbers[j] = takes ? number : numbers[j];
    }
  }
}

template <class Storage, class T, class Number>
void maxima(const PoolMaxLine<Storage, T, Number>& line) {
  if (line.lanes > 0) return tiles<PYDIST_VECTOR_BYTES / sizeof(T)>(line, 0);
  // Steps that are known when compiled become shuffles; others are gathered.
  if (line.step == 1) return by_taps(line, std::integral_constant<std::int64_t, 1>{});
  if (line.step == 2) return by_taps(line, std::integral_constant<std::int64_t, 2>{});
  by_taps(line, line.step);
}

}  // namespace

const PoolMaxTable kPoolMax = {
    &maxima<ops::Float16, float, std::int32_t>, &maxima<ops::BFloat16, float, std::int32_t>,
    &maxima<float, float, std::int32_t>, &maxima<double, double, std::int64_t>};

}  // namespace pydist::cpu::PYDIST_ISA_NAME
