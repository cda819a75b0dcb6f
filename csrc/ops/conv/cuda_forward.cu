#include "ops/conv/cuda.cuh"

namespace pydist::cuda {

void boundary_conv_forward(const kernels::ConvProblem& problem, const MmaCall& mma,
                           const Queue& queue) {
  convolve<kernels::ConvOp::kForward>(problem, mma, queue, "launch of boundary_conv_forward");
}

}  // namespace pydist::cuda
