// Boundary convolution on CUDA devices: the gradient of the weight.
#include "ops/conv/cuda.cuh"

namespace pydist::cuda {

void boundary_conv_wgrad(const ops::ConvProblem& problem, const MmaCall& mma, const Queue& queue) {
  convolve<ops::ConvOp::kWgrad>(problem, mma, queue, "launch of boundary_conv_wgrad");
}

}  // namespace pydist::cuda
