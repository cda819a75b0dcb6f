// The launch of one of the three boundary convolutions on tensor cores.
#pragma once

#include "cuda/kernels.hpp"
#include "cuda/runtime.cuh"
#include "kernels/conv_mma_choice.hpp"
#include "launch/cuda.cuh"

namespace pydist::cuda {

template <kernels::ConvOp kOp>
void convolve_mma(const kernels::ConvProblem& problem, kernels::ConvMath math, float* partial,
                  const Queue& queue, const char* what) {
  const DeviceGuard guard(queue.device);
  kernels::with_mma_body<kOp>(problem, math, [&]<class Body>(std::type_identity<Body>) {
    const Body body = Body::make(problem, partial);
    check(launch::run_warp_tiles_on_cuda(body, stream_of(queue)), what);
    const kernels::ConvPartialBody<Body> rest{body};
    check(launch::run_on_cuda(rest, body.n_extent, stream_of(queue)), what);
  });
}

}  // namespace pydist::cuda
