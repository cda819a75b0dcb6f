// The CUDA launcher: the only place with <<<>>>. Launches go to the stream given and return without
// waiting. With PYDIST_CUDA=EMULATED, tests/native/emulated/launch/cuda.cuh is included instead.
//
// Three launches, one per concept of decomposition.hpp. Bodies are passed by value, as the
// parameter of the kernel (__grid_constant__: it is read in place, and not copied by each thread),
// so a launch allocates nothing and a captured graph can hold it.
#pragma once

#include <cuda_runtime.h>

#include "launch/decomposition.hpp"

namespace pydist::launch {

// Blocks per multiprocessor: 64 registers per thread. Without this bound, the compiler spills some
// registers for the sake of more blocks. A body that needs more registers sets fewer blocks.
inline constexpr int kRunBlocks = 4;

template <class Body>
constexpr int run_blocks() {
  if constexpr (requires { Body::kRunBlocks; }) {
    return Body::kRunBlocks;
  } else {
    return kRunBlocks;
  }
}

// A grid of threads that walk over the rows; see run_thread.
template <RunBody Body>
__global__ void __launch_bounds__(kRunThreads, run_blocks<Body>())
    run_kernel(const __grid_constant__ Body body, const RunGrid grid) {
  run_thread(body, grid, static_cast<index_t>(blockIdx.x) * kRunThreads + threadIdx.x);
}

// Runs `body` in one launch; none for a body without rows. `words`: accesses of an average row,
// which determine the lanes per row (run_grid).
template <RunBody Body>
cudaError_t run_on_cuda(const Body& body, index_t words, cudaStream_t stream) {
  if (body.rows() == 0) return cudaSuccess;
  const RunGrid grid = run_grid(body.rows(), words);
  run_kernel<<<static_cast<unsigned>(grid.blocks), kRunThreads, 0, stream>>>(body, grid);
  return cudaGetLastError();  // of this launch; clears it
}

// A block per tile. The first barrier makes loaded data visible, the second keeps the next load
// from overwriting data that other threads still read.
template <TileBody Body>
__global__ void __launch_bounds__(Body::kThreads) tile_kernel(const __grid_constant__ Body body) {
  __shared__ typename Body::Shared shared;
  const auto block = static_cast<index_t>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  typename Body::Thread state;
  body.begin(block, thread, state);
  const index_t steps = body.steps(block);
  for (index_t step = 0; step < steps; ++step) {
    body.load(block, step, thread, state, shared);
    __syncthreads();
    body.compute(thread, shared, state);
    __syncthreads();
  }
  body.end(block, thread, state);
}

template <TileBody Body>
cudaError_t run_tiles_on_cuda(const Body& body, cudaStream_t stream) {
  if (body.blocks() == 0) return cudaSuccess;
  tile_kernel<<<static_cast<unsigned>(body.blocks()), Body::kThreads, 0, stream>>>(body);
  return cudaGetLastError();
}

// Copies of 8 or 16 bytes that do not go through registers.
struct AsyncCopies {
  template <int kBytes>
  PYDIST_HD void copy([[maybe_unused]] void* to, [[maybe_unused]] const void* from,
                      [[maybe_unused]] bool inside) const {
    static_assert(kBytes == 8 || kBytes == 16);
#if defined(__CUDA_ARCH__)
    const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    const int bytes = inside ? kBytes : 0;  // the rest becomes zero
    // Through the L1 cache: copies of 16 bytes share sectors of 32, and adjacent kernel indices
    // read the same elements.
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from),
                 "n"(kBytes), "r"(bytes)
                 : "memory");
#endif
  }

  PYDIST_HD void wait() const {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  }
};

// Blocks of four warps per multiprocessor: 168 registers per thread (see kRunBlocks).
inline constexpr int kWarpTileBlocks = 3;

// A block per tile, with two stages: step s + 1 is fetched while step s is multiplied. One barrier
// per step is enough: it makes the fetched stage visible, and no thread fetches into a stage before
// all have left it.
template <WarpTileBody Body>
__global__ void __launch_bounds__(Body::kThreads, kWarpTileBlocks)
    warp_tile_kernel(const __grid_constant__ Body body) {
  __shared__ typename Body::Table table;
  __shared__ typename Body::Stage stages[2];
  const auto block = static_cast<index_t>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const AsyncCopies copies;
  typename Body::Thread state;
  body.begin(block, thread, state, table);
  __syncthreads();
  const index_t steps = body.steps(block);
  for (index_t step = -1; step < steps; ++step) {
    if (step + 1 < steps) {
      body.fetch(block, step + 1, thread, state, table, stages[(step + 1) & 1], copies);
    }
    if (step >= 0) {
#pragma unroll
      for (int slice = 0; slice < Body::kSlices; ++slice) {
        body.load(slice, thread, stages[step & 1], state);
        body.multiply(block, step, slice, thread / kWarp, Warp<typename Body::Thread>{&state});
      }
    }
    copies.wait();
    __syncthreads();
  }
  body.end(block, thread, state);
}

template <WarpTileBody Body>
cudaError_t run_warp_tiles_on_cuda(const Body& body, cudaStream_t stream) {
  if (body.blocks() == 0) return cudaSuccess;
  warp_tile_kernel<<<static_cast<unsigned>(body.blocks()), Body::kThreads, 0, stream>>>(body);
  return cudaGetLastError();
}

}  // namespace pydist::launch
