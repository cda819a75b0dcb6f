// Boundary convolution on CUDA devices: the gradient of the inputs.
//
// in gradient[i] += sum over taps k and channels co of out gradient[o] * weight[k], where i =
// o * stride + k * dilation + base, for the inputs that the slab reaches.
// Proof on a device: tests/gpu/test_kernels_gpu.py and test_conv_gpu.py.
#include "ops/conv/cuda.cuh"

namespace pydist::cuda {

void boundary_conv_dgrad(const ops::ConvProblem& problem, const MmaCall& mma, const Queue& queue) {
  convolve<ops::ConvOp::kDgrad>(problem, mma, queue, "launch of boundary_conv_dgrad");
}

}  // namespace pydist::cuda
