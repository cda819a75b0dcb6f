// Takes the place of csrc/launch/cuda.cuh where PYDIST_CUDA=EMULATED (it comes first on the include
// path): the same launchers, with the threads run by emulate.hpp on the calling thread. So all host
// code of the families' cuda*.cu runs as it stands: tables, dispatch, grids, groups.
#pragma once

#include <cuda_runtime.h>

#include <limits>
#include <memory>
#include <type_traits>

#include "launch/emulate.hpp"

namespace pydist::launch {

inline constexpr std::size_t kParameterBytes = 32764;   // of a kernel, on sm_70 and later
inline constexpr std::size_t kSharedBytes = 48 * 1024;  // that a kernel has without asking

// The order of threads: another one with every launch of the calling thread.
inline ThreadOrder next_order() {
  static thread_local std::size_t launches = 0;
  return kThreadOrders[launches++ % std::size(kThreadOrders)];
}

// Runs emulate(body, order) as a launch would: on a copy of the body's bytes, only if a device
// takes a grid of so many blocks, and if it is captured, with every replay.
template <class Body, std::size_t kShared, class Emulate>
cudaError_t launch_emulated(const Body& body, index_t blocks, cudaStream_t stream,
                            const Emulate& emulate) {
  static_assert(std::is_trivially_copyable_v<Body>);
  static_assert(sizeof(Body) + sizeof(RunGrid) <= kParameterBytes);
  static_assert(kShared <= kSharedBytes);
  PYDIST_INVARIANT(stream == nullptr);  // the calling thread: another stream would have its own
  if (blocks < 1 || blocks > std::numeric_limits<std::int32_t>::max()) {
    return emulated::done(cudaErrorInvalidConfiguration);
  }
  emulated::launch(
      [copy = std::make_shared<const Body>(body), emulate] { emulate(*copy, next_order()); });
  return cudaGetLastError();
}

template <RunBody Body>
cudaError_t run_on_cuda(const Body& body, index_t words, cudaStream_t stream) {
  if (body.rows() == 0) return cudaSuccess;
  const RunGrid grid = run_grid(body.rows(), words);
  return launch_emulated<Body, 0>(
      body, grid.blocks, stream,
      [grid](const Body& copy, ThreadOrder order) { emulate_runs(copy, grid, order); });
}

template <RunBody Body>
cudaError_t run_after_on_cuda(const Body& body, index_t words, cudaStream_t stream) {
  return run_on_cuda(body, words, stream);
}

template <TileBody Body>
cudaError_t run_tiles_on_cuda(const Body& body, cudaStream_t stream) {
  if (body.blocks() == 0) return cudaSuccess;
  return launch_emulated<Body, sizeof(typename Body::Shared)>(
      body, body.blocks(), stream,
      [](const Body& copy, ThreadOrder order) { emulate_tiles(copy, order); });
}

template <WarpTileBody Body>
cudaError_t run_warp_tiles_on_cuda(const Body& body, cudaStream_t stream) {
  if (body.blocks() == 0) return cudaSuccess;
  return launch_emulated<Body, sizeof(typename Body::Table) + kWarpTileBytes<Body>>(
      body, body.blocks(), stream,
      [](const Body& copy, ThreadOrder order) { emulate_warp_tiles(copy, order); });
}

}  // namespace pydist::launch
