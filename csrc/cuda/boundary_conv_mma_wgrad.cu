#include "cuda/boundary_conv_mma.cuh"

namespace pydist::cuda {

void boundary_conv_wgrad_mma(const kernels::ConvProblem& problem, kernels::ConvMath math,
                             float* partial, const Queue& queue) {
  convolve_mma<kernels::ConvOp::kWgrad>(problem, math, partial, queue,
                                        "launch of boundary_conv_wgrad on tensor cores");
}

}  // namespace pydist::cuda
