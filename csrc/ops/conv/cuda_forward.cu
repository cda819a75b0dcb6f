// Boundary convolution on CUDA devices: forward.
//
// out[o] += sum over taps k and channels ci of in[o * stride + k * dilation + base] * weight[k],
// for the outputs that the slab reaches.
// Proof on a device: tests/gpu/test_kernels_gpu.py and test_conv_gpu.py.
#include "ops/conv/cuda.cuh"

namespace pydist::cuda {

void boundary_conv_forward(const ops::ConvProblem& problem, const MmaCall& mma,
                           const Queue& queue) {
  convolve<ops::ConvOp::kForward>(problem, mma, queue, "launch of boundary_conv_forward");
}

}  // namespace pydist::cuda
