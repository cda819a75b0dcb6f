// Random numbers keyed by global position, for a box of a global array.
#pragma once

#include <cstdint>

#include "core/view.hpp"
#include "ops/random/philox.hpp"

namespace pydist::ops {

// A key, or its address when the numbers are drawn: every replay of a captured step draws with a
// new key. Plain data.
struct UniformKey {
  std::uint64_t value = 0;
  const std::uint64_t* at = nullptr;

  PYDIST_HD std::uint64_t read() const { return at == nullptr ? value : *at; }
};

// A box of a C-order array of `shape`: local index i is the global index lo + i. Plain data.
struct KeyedBox {
  int ndim;
  index_t extent[kMaxDims];        // of the box
  index_t stride[kMaxDims];        // of the memory, in elements
  std::uint64_t global[kMaxDims];  // of the counter
  std::uint64_t first;             // counter of the box's first element
  UniformKey key;
};

inline KeyedBox keyed_box(const TensorView& out, const UniformKey& key, const Coords& lo,
                          const Coords& shape) {
  KeyedBox box{};
  box.ndim = out.ndim();
  box.key = key;
  std::uint64_t stride = 1;
  for (int dim = out.ndim() - 1; dim >= 0; --dim) {
    box.extent[dim] = out.shape[dim];
    box.stride[dim] = out.strides[dim];
    box.global[dim] = stride;
    box.first += static_cast<std::uint64_t>(lo[dim]) * stride;
    stride *= static_cast<std::uint64_t>(shape[dim]);
  }
  return box;
}

// One run: the last dim.
struct KeyedRun {
  index_t offset;
  std::uint64_t counter;
};

PYDIST_HD KeyedRun find_keyed_run(const KeyedBox& box, index_t r) {
  KeyedRun run{0, box.first};
  for (int dim = box.ndim - 2; dim >= 0; --dim) {
    const index_t above = r / box.extent[dim];
    const index_t index = r - above * box.extent[dim];
    run.offset += index * box.stride[dim];
    run.counter += static_cast<std::uint64_t>(index) * box.global[dim];
    r = above;
  }
  return run;
}

// out[i] = U[0, 1) keyed by the global C-order index of lo + i.
//
// Index formula: counter = sum_d (lo_d + i_d) * prod_{e > d} shape_e, as a 64-bit Philox counter.
// Threads: CPU, rows over threads, vectorized along the last dim; CUDA, a warp per row, lanes along
//   it.
// Traffic: one element written, nothing read; about 60 integer operations per element.
// Proof: tests/kernels/test_uniform.py (Random123's vectors, independence of the cut),
//   tests/native/test_random.cpp (emulated warps against the CPU).
// CPU code: this body; contiguous rows use the same formula compiled per instruction set
//   (isa_uniform.cpp), twice as fast with AVX-512 as without.
template <class T>
struct KeyedUniform {
  T* out;
  KeyedBox box;
  index_t row_count;

  PYDIST_HD index_t rows() const { return row_count; }
  PYDIST_HD KeyedRun row(index_t r) const { return find_keyed_run(box, r); }

  template <class Loop>
  PYDIST_HD void each(const KeyedRun& run, const Loop& loop) const {
    const index_t stride = box.stride[box.ndim - 1];
    T* const to = out + run.offset;
    const std::uint64_t key = box.key.read();
    loop(box.extent[box.ndim - 1], [=](index_t j) {
      to[j * stride] = uniform<T>(key, run.counter + static_cast<std::uint64_t>(j));
    });
  }
};

}  // namespace pydist::ops
