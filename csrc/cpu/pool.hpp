// Sums over pooling windows on the CPU, and their adjoint.
//
// Separable: the rows of a window are added up first, along depth and height, then the width.
// Results do not depend on the number of threads: every element is summed by one task, in a fixed
// order.
#pragma once

#include "kernels/pool.hpp"

namespace pydist::cpu {

void pool_sum_forward(const kernels::PoolProblem& problem);   // writes out
void pool_sum_backward(const kernels::PoolProblem& problem);  // writes in

}  // namespace pydist::cpu
