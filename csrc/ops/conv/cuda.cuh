// The launches of one of the three boundary convolutions. Each has a .cu file, so that they compile
// in parallel: each has some twenty instances.
#pragma once

#include "launch/cuda.cuh"
#include "launch/runtime.cuh"
#include "ops/conv/kernels.hpp"
#include "ops/conv/mma_choice.hpp"
#include "ops/conv/partial_body.hpp"
#include "ops/conv/tile_body.hpp"

namespace pydist::cuda {

// On tensor cores two launches, the second of which adds up split sums; else one.
//
// Threads, traffic and proof: mma_body.hpp and partial_body.hpp on tensor cores, else
// tile_body.hpp. The second launch may begin while the first still runs, and waits for it on the
// device. It has no rows, and is not made, where sums are not split.
template <ops::ConvOp kOp>
void convolve(const ops::ConvProblem& problem, const MmaCall& mma, const Queue& queue,
              const char* what) {
  const DeviceGuard guard(queue.device);
  if (mma) {
    ops::with_mma_body<kOp>(problem, mma->math, [&]<class Body>(std::type_identity<Body>) {
      const Body body = Body::make(problem, mma->partial);
      check(launch::run_warp_tiles_on_cuda(body, stream_of(queue)), what);
      const ops::ConvPartialBody<Body> rest{body};
      check(launch::run_after_on_cuda(rest, body.n_extent, stream_of(queue)), what);
    });
  } else {
    ops::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
      const auto body = ops::ConvTileBody<kOp, Storage>::make(problem);
      check(launch::run_tiles_on_cuda(body, stream_of(queue)), what);
    });
  }
}

}  // namespace pydist::cuda
