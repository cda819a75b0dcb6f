// The CUDA launcher: the only place with <<<>>>. Launches go to the stream given and return at
// once.
#pragma once

#include <cuda_runtime.h>

#include "launch/decomposition.hpp"

namespace pydist::launch {

// Blocks that share a multiprocessor: 64 registers a thread. Left to itself, the compiler spills
// some of them for the sake of more blocks. A body that needs more says how many blocks it leaves.
inline constexpr int kRunBlocks = 4;

template <class Body>
constexpr int run_blocks() {
  if constexpr (requires { Body::kRunBlocks; }) {
    return Body::kRunBlocks;
  } else {
    return kRunBlocks;
  }
}

template <RunBody Body>
__global__ void __launch_bounds__(kRunThreads, run_blocks<Body>())
    run_kernel(const __grid_constant__ Body body, const RunGrid grid) {
  run_thread(body, grid, static_cast<index_t>(blockIdx.x) * kRunThreads + threadIdx.x);
}

// Runs `body` in one launch. Nothing is launched for a body without rows.
template <RunBody Body>
cudaError_t run_on_cuda(const Body& body, index_t words, cudaStream_t stream) {
  if (body.rows() == 0) return cudaSuccess;
  const RunGrid grid = run_grid(body.rows(), words);
  run_kernel<<<static_cast<unsigned>(grid.blocks), kRunThreads, 0, stream>>>(body, grid);
  return cudaGetLastError();  // of this launch; clears it
}

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

}  // namespace pydist::launch
