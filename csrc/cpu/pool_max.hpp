// Maxima over pooling windows on the CPU, with the place of each, and their adjoint.
//
// Results do not depend on the number of threads: every element is found by one task, in a fixed
// order.
#pragma once

#include "kernels/pool_max.hpp"

namespace pydist::cpu {

void pool_max_forward(const kernels::MaxProblem& problem);   // writes out and taps
void pool_max_backward(const kernels::MaxProblem& problem);  // writes in
void pool_max_pick(const kernels::MaxProblem& problem);      // writes out

}  // namespace pydist::cpu
