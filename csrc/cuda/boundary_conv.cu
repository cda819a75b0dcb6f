#include "cuda/kernels.hpp"
#include "cuda/runtime.cuh"
#include "kernels/conv_tile.hpp"
#include "kernels/dispatch.hpp"
#include "launch/cuda.cuh"

namespace pydist::cuda {
namespace {

using kernels::ConvOp;
using kernels::ConvProblem;

template <ConvOp kOp>
void convolve(const ConvProblem& problem, const Queue& queue, const char* what) {
  const DeviceGuard guard(queue.device);
  kernels::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
    const auto body = kernels::ConvTileBody<kOp, Storage>::make(problem);
    check(launch::run_tiles_on_cuda(body, stream_of(queue)), what);
  });
}

}  // namespace

void boundary_conv_forward(const ConvProblem& problem, const Queue& queue) {
  convolve<ConvOp::kForward>(problem, queue, "launch of boundary_conv_forward");
}

void boundary_conv_dgrad(const ConvProblem& problem, const Queue& queue) {
  convolve<ConvOp::kDgrad>(problem, queue, "launch of boundary_conv_dgrad");
}

void boundary_conv_wgrad(const ConvProblem& problem, const Queue& queue) {
  convolve<ConvOp::kWgrad>(problem, queue, "launch of boundary_conv_wgrad");
}

}  // namespace pydist::cuda
