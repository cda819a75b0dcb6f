// Boundary convolution on the CPU: what a halo slab adds to a convolution and to its gradients.
//
// The cost is that of the boundary planes the slab reaches, not of the whole output. Results do not
// depend on the number of threads: every element is summed by one task, in a fixed order.
#pragma once

#include "kernels/conv_problem.hpp"

namespace pydist::cpu {

void boundary_conv_forward(const kernels::ConvProblem& problem);  // writes out
void boundary_conv_dgrad(const kernels::ConvProblem& problem);    // writes in
void boundary_conv_wgrad(const kernels::ConvProblem& problem);    // writes weight

}  // namespace pydist::cpu
