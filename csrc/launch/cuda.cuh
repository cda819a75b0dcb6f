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

// What a device runs of this file: the code for its own compute capability, or for an earlier one.
template <class = void>
__global__ void probe_kernel() {}

// Whether kernels on the current device form clusters and wait for an earlier kernel: those that
// were compiled for compute capability 9.0 or later. Code for 8.0 runs on such devices, too, if
// there is no other (PYDIST_CUDA_ARCHITECTURES), and has neither the barrier nor the wait.
inline bool has_clusters() {
  thread_local int asked = -1;
  thread_local bool has = false;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (device != asked) {
    cudaFuncAttributes code{};
    has = cudaFuncGetAttributes(&code, probe_kernel<>) == cudaSuccess && code.ptxVersion >= 90;
    asked = device;
  }
  return has;
}

// As run_kernel, launched while the kernel before it on the stream still runs; its threads wait
// until that kernel is complete. This hides the latency of a launch (before sm_90 it does not).
template <RunBody Body>
__global__ void __launch_bounds__(kRunThreads, run_blocks<Body>())
    run_after_kernel(const __grid_constant__ Body body, const RunGrid grid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  run_thread(body, grid, static_cast<index_t>(blockIdx.x) * kRunThreads + threadIdx.x);
}

// Runs `body` after the kernel that the same call has just launched on `stream`.
template <RunBody Body>
cudaError_t run_after_on_cuda(const Body& body, index_t words, cudaStream_t stream) {
  if (body.rows() == 0) return cudaSuccess;
  const RunGrid grid = run_grid(body.rows(), words);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(grid.blocks);
  config.blockDim = kRunThreads;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = has_clusters() ? 1 : 0;
  static_cast<void>(cudaLaunchKernelEx(&config, run_after_kernel<Body>, body, grid));
  return cudaGetLastError();
}

// The same for tiles. Without a bound, unless a body sets one: 0 is none.
template <class Body>
constexpr int tile_blocks() {
  if constexpr (requires { Body::kTileBlocks; }) {
    return Body::kTileBlocks;
  } else {
    return 0;
  }
}

// A block per tile. The first barrier makes loaded data visible, the second keeps the next load
// from overwriting data that other threads still read.
template <TileBody Body>
__global__ void __launch_bounds__(Body::kThreads, tile_blocks<Body>())
    tile_kernel(const __grid_constant__ Body body) {
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

// Copies of 4, 8 or 16 bytes that do not go through registers.
struct AsyncCopies {
  template <int kBytes>
  PYDIST_HD void copy([[maybe_unused]] void* to, [[maybe_unused]] const void* from,
                      [[maybe_unused]] bool inside) const {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#if defined(__CUDA_ARCH__)
    const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    const int bytes = inside ? kBytes : 0;  // the rest becomes zero
    // Through the L1 cache: copies of 16 bytes share sectors of 32, and adjacent kernel indices
    // read the same elements. Not said to change memory: that is for wait() to say, and a compiler
    // would read all tables again after each copy.
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from),
                 "n"(kBytes), "r"(bytes));
#endif
  }

  // Closes a group of copies; there may be none in it.
  PYDIST_HD void commit() const {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }

  // Waits until only the newest kInFlight groups may be in flight.
  template <int kInFlight>
  PYDIST_HD void wait() const {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.wait_group %0;" ::"n"(kInFlight) : "memory");
#endif
  }
};

// Barrier of a cluster: what a block wrote to its shared memory is visible to the others. The
// launcher makes clusters only where a device has them.
__device__ __forceinline__ void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#endif
}

// A block's memory must remain until all of the cluster have read it; nothing is published.
__device__ __forceinline__ void cluster_end() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
#endif
}

// The sums in the shared memory of each block of a cluster.
template <class Sums>
struct ClusterPeers {
  const Sums* own;
  bool is_alone;

  __device__ __forceinline__ const Sums& operator()([[maybe_unused]] int rank) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (is_alone) return *own;
    const Sums* peer;
    asm("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(own), "r"(rank));
    return *peer;
#else
    return *own;
#endif
  }
};

// Blocks of four warps per multiprocessor: 128 registers per thread (see kRunBlocks).
inline constexpr int kWarpTileBlocks = 4;

// A block per tile, with stages: while step s is multiplied, steps s + 1 to s + kStages - 1 are in
// flight, so that a step costs no latency of memory. One barrier per step is enough: it makes the
// fetched stage visible, and the stage that is fetched next is the one that all have left by then.
template <WarpTileBody Body>
__global__ void __launch_bounds__(Body::kThreads, kWarpTileBlocks)
    warp_tile_kernel(const __grid_constant__ Body body) {
  constexpr int kStages = Body::kStages;
  __shared__ typename Body::Table table;
  __shared__ alignas(16) unsigned char memory[kWarpTileBytes<Body>];
  auto* const stages = reinterpret_cast<typename Body::Stage*>(memory);
  const auto block = static_cast<index_t>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const AsyncCopies copies;
  typename Body::Thread state;
  body.begin(block, thread, state, table);
  __syncthreads();
  const int steps = static_cast<int>(body.steps(block));
#pragma unroll 1  // a copy of fetch, which is long, is enough
  for (int step = 1 - kStages; step < steps; ++step) {
    if (step >= 0) {
      copies.wait<kStages - 2>();
      __syncthreads();
    }
    const int next = step + kStages - 1;
    if (next < steps) {
      body.fetch(next, thread, state, table, stages[static_cast<unsigned>(next) % kStages], copies);
    }
    copies.commit();
    if (step >= 0) {
#pragma unroll
      for (int slice = 0; slice < Body::kSlices; ++slice) {
        body.load(slice, thread, stages[static_cast<unsigned>(step) % kStages], state);
        body.multiply(step, slice, thread / kWarp, Warp<typename Body::Thread>{&state});
      }
    }
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // A kernel of run_after_on_cuda may begin to wait for this one when all blocks are here.
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  auto* const sums = reinterpret_cast<typename Body::Sums*>(memory);
  const bool is_alone = body.cluster() == 1;
  copies.wait<0>();
  __syncthreads();  // all have left the stages
  body.share(block, thread, state, *sums);
  if (is_alone) {
    __syncthreads();
  } else {
    cluster_barrier();
  }
  body.end(block, thread, ClusterPeers<typename Body::Sums>{sums, is_alone});
  if (!is_alone) cluster_end();
}

template <WarpTileBody Body>
cudaError_t run_warp_tiles_on_cuda(const Body& body, cudaStream_t stream) {
  if (body.blocks() == 0) return cudaSuccess;
  if (body.cluster() == 1 || !has_clusters()) {
    const Body alone = body.alone();
    warp_tile_kernel<<<static_cast<unsigned>(alone.blocks()), Body::kThreads, 0, stream>>>(alone);
    return cudaGetLastError();
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(body.cluster()), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(body.blocks());
  config.blockDim = Body::kThreads;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  static_cast<void>(cudaLaunchKernelEx(&config, warp_tile_kernel<Body>, body));
  return cudaGetLastError();
}

}  // namespace pydist::launch
