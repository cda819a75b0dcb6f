// Converts stored values to a network's input in one pass: int16 to float, log1p, normalization.
//
// Two bodies. Integers of 8 and 16 bits use a table of all their values, for any map (LookUp); all
// other types compute it (Rescale). Both set a flag if a result is not finite, in the same pass.
#pragma once

#include <cstdint>

#include "core/view.hpp"
#include "launch/host_device.hpp"
#include "launch/run_body.hpp"
#include "ops/common/half.hpp"
#include "ops/common/vector.hpp"
#include "ops/common/word.hpp"
#include "ops/input/rescaled.hpp"

namespace pydist::ops {

inline constexpr int kBlockDims = 4;  // [C, D, H, W]

// A block and its input, both with any strides, in elements. Plain data.
struct ConvertGrid {
  index_t extent[kBlockDims];
  index_t from_stride[kBlockDims];
  index_t to_stride[kBlockDims];

  PYDIST_HD index_t rows() const { return extent[0] * extent[1] * extent[2]; }
  index_t elements() const { return rows() * extent[3]; }
};

inline ConvertGrid convert_grid(const TensorView& from, const TensorView& to) {
  ConvertGrid grid{};
  for (int dim = 0; dim < kBlockDims; ++dim) {
    grid.extent[dim] = from.shape[dim];
    grid.from_stride[dim] = from.strides[dim];
    grid.to_stride[dim] = to.strides[dim];
  }
  return grid;
}

// One run: the last dim.
struct ConvertRun {
  index_t from, to, channel;
};

PYDIST_HD ConvertRun find_convert_run(const ConvertGrid& grid, index_t r) {
  ConvertRun run{0, 0, 0};
  for (int dim = kBlockDims - 2; dim > 0; --dim) {
    const index_t above = r / grid.extent[dim];
    const index_t index = r - above * grid.extent[dim];
    run.from += index * grid.from_stride[dim];
    run.to += index * grid.to_stride[dim];
    r = above;
  }
  run.channel = r;
  run.from += r * grid.from_stride[0];
  run.to += r * grid.to_stride[0];
  return run;
}

// Several threads may set the flag; all of them write the same value.
PYDIST_HD void report(std::int32_t* found, std::uint32_t is_bad) {
  if (!is_bad) return;
#if defined(__CUDA_ARCH__)
  *found = 1;
#else
  __atomic_store_n(found, 1, __ATOMIC_RELAXED);
#endif
}

// to[c, i] = table[c, bits of from[c, i]] / divisor: any map of 8 and 16 bit integers.
//
// Bits: the table's, on every device; the table is made once, on the host.
// Threads: CPU, rows (the last dim) over threads; CUDA, a warp (or less) per row, lanes along it;
//   they write 16 bytes each if rows are contiguous on both sides and begin at the same alignment.
// Traffic: 1 or 2 bytes read and 4 or 8 written per element; the used entries of the table (at most
//   256 KB of floats) stay in the caches.
// Proof: tests/native/test_input.cpp, tests/kernels/test_convert.py (against NumPy).
template <class From, class To>
struct LookUp {
  // What is read ahead takes registers, and so do divisions in double.
  static constexpr int kRunBlocks = sizeof(To) == 4 ? 3 : 2;

  const From* from;  // unsigned, as wide as the stored type
  To* to;
  const To* table;       // [channels, entries]
  index_t table_stride;  // from channel to channel
  To divisor;
  std::int32_t* found;  // becomes 1 if a result is not finite
  ConvertGrid grid;

  PYDIST_HD index_t rows() const { return grid.rows(); }
  PYDIST_HD ConvertRun row(index_t r) const { return find_convert_run(grid, r); }
  index_t accesses() const {  // of a row
    return unit_steps() ? ceil_div(grid.extent[3], index_t{kVector}) : grid.extent[3];
  }

  template <class Loop>
  PYDIST_HD void each(const ConvertRun& run, const Loop& loop) const {
    const From* const source = from + run.from;
    To* const target = to + run.to;
    const To* const entries = table + run.channel * table_stride;
    const index_t step = grid.from_stride[3], target_step = grid.to_stride[3];
    const To by = divisor;
    const bool divides = by != To{1};  // a separate loop if not: divisions take half the time
    std::uint32_t bad = 0;
    const auto value_of = [=, &bad](From stored) {
      const To entry = entries[stored];
      const To value = divides ? entry / by : entry;
      bad |= not_finite(value);
      return value;
    };
    // A Move: the first access is to memory, look-ups are in the caches.
    const auto elements = [&](index_t first, index_t count) {
      loop(count, launch::Move{[=](index_t j) { return source[(first + j) * step]; },
                               [=](index_t j, From stored) {
                                 target[(first + j) * target_step] = value_of(stored);
                               }});
    };
    index_t head = 0, vectors = 0;
    if constexpr (!launch::BulkLoop<Loop>) {  // a CPU's loads do not wait for look-ups
      if (unit_steps()) find_vectors(source, target, head, vectors);
      if (vectors > 0) {
        const auto* const words = reinterpret_cast<const Stored*>(source + head);
        To* const values = target + head;
        loop(vectors, launch::Move{[=](index_t j) { return words[j]; },
                                   [=](index_t j, const Stored& word) {
                                     const auto stored = bits_as<Vector<From, kVector>>(word);
                                     Vector<To, kVector> made;
                                     PYDIST_UNROLLED
                                     for (int e = 0; e < kVector; ++e) {
                                       made.element[e] = value_of(stored.element[e]);
                                     }
                                     made.store(values + j * kVector);
                                   }});
        if (head > 0) elements(0, head);
        head += vectors * kVector;
      }
    }
    if (head < grid.extent[3]) elements(head, grid.extent[3] - head);
    report(found, bad);
  }

 private:
  static constexpr int kVector = kVectorElements<To>;
  using Stored = Word<kVector * sizeof(From)>;  // of as many elements

  PYDIST_HD bool unit_steps() const { return grid.from_stride[3] == 1 && grid.to_stride[3] == 1; }

  // Where the vectors of a row begin and how many it has: none if its two sides are aligned at
  // different elements.
  PYDIST_HD void find_vectors(const From* source, const To* target, index_t& head,
                              index_t& vectors) const {
    const auto address = reinterpret_cast<std::uintptr_t>(target);
    const auto beyond = static_cast<index_t>(address % kVectorBytes / sizeof(To));
    const index_t first = beyond == 0 ? 0 : kVector - beyond;
    if (reinterpret_cast<std::uintptr_t>(source + first) % sizeof(Stored) != 0) return;
    if (grid.extent[3] - first < kVector) return;
    head = first;
    vectors = (grid.extent[3] - first) / kVector;
  }
};

// to[c, i] = (L(clip(from[c, i])) - shift_c) / scale_c / divisor, L the identity or log1p; see
// rescaled().
//
// Threads and proof: as LookUp.
// Traffic: one element read, one written; some 25 operations in double for the logarithm, 4
// without.
// CPU code: this body; floats use the same formula compiled per instruction set (isa_rescale.cpp),
//   5 times as fast with the logarithm and AVX-512 as without.
template <class From, class To>
struct Rescale {
  static constexpr int kRunBlocks = 2;

  const From* from;
  To* to;
  const ChannelMap* maps;  // [channels]
  bool log;
  To divisor;
  std::int32_t* found;  // becomes 1 if a result is not finite
  ConvertGrid grid;

  PYDIST_HD index_t rows() const { return grid.rows(); }
  PYDIST_HD ConvertRun row(index_t r) const { return find_convert_run(grid, r); }
  index_t accesses() const { return grid.extent[3]; }

  template <class Loop>
  PYDIST_HD void each(const ConvertRun& run, const Loop& loop) const {
    const ChannelMap map = maps[run.channel];
    if (log) {
      map.moves() ? walk<true, true>(run, map, loop) : walk<true, false>(run, map, loop);
    } else {
      map.moves() ? walk<false, true>(run, map, loop) : walk<false, false>(run, map, loop);
    }
  }

 private:
  template <bool kLog, bool kMoves, class Loop>
  PYDIST_HD void walk(const ConvertRun& run, const ChannelMap& map, const Loop& loop) const {
    const From* const source = from + run.from;
    To* const target = to + run.to;
    const index_t step = grid.from_stride[3], target_step = grid.to_stride[3];
    const To by = divisor;
    std::uint32_t bad = 0;
    loop(grid.extent[3], [=, &bad](index_t j) {
      const To value = rescaled<To, kLog, kMoves>(source[j * step], map, by);
      target[j * target_step] = value;
      bad |= not_finite(value);
    });
    report(found, bad);
  }
};

}  // namespace pydist::ops
