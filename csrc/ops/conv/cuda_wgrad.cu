// Boundary convolution on CUDA devices: the gradient of the weight.
//
// weight gradient[k] += sum over the reached outputs o of in[o * stride + k * dilation + base] *
// out gradient[o].
// Proof on a device: tests/gpu/test_kernels_gpu.py and test_conv_gpu.py.
#include "ops/conv/cuda.cuh"

namespace pydist::cuda {

void boundary_conv_wgrad(const ops::ConvProblem& problem, const MmaCall& mma, const Queue& queue) {
  convolve<ops::ConvOp::kWgrad>(problem, mma, queue, "launch of boundary_conv_wgrad");
}

}  // namespace pydist::cuda
