// Boundary convolution on CUDA devices: forward.
#include "ops/conv/cuda.cuh"

namespace pydist::cuda {

void boundary_conv_forward(const ops::ConvProblem& problem, const MmaCall& mma,
                           const Queue& queue) {
  convolve<ops::ConvOp::kForward>(problem, mma, queue, "launch of boundary_conv_forward");
}

}  // namespace pydist::cuda
