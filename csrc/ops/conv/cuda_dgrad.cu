// Boundary convolution on CUDA devices: the gradient of the inputs.
#include "ops/conv/cuda.cuh"

namespace pydist::cuda {

void boundary_conv_dgrad(const ops::ConvProblem& problem, const MmaCall& mma, const Queue& queue) {
  convolve<ops::ConvOp::kDgrad>(problem, mma, queue, "launch of boundary_conv_dgrad");
}

}  // namespace pydist::cuda
