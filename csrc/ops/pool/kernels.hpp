// Sums and maxima over pooling windows, and their adjoints.
//
// Results do not depend on the number of threads: every element is computed by one task, in a fixed
// order. Maxima and their taps are bit-identical on CPU and devices; sums differ by rounding, as
// the CPU sums dim by dim.
//
// Bindings have checked all arrays. Functions of cpu return when the results are written; those of
// cuda put their work on the queue and return, and throw CudaError if it can't be launched, or
// UsageError if indices do not fit into 32 bits.
#pragma once

#include "launch/device.hpp"
#include "ops/pool/max_body.hpp"
#include "ops/pool/sum_body.hpp"

namespace pydist::cpu {

void pool_sum_forward(const ops::PoolProblem& problem);   // writes out
void pool_sum_backward(const ops::PoolProblem& problem);  // writes in

void pool_max_forward(const ops::MaxProblem& problem);   // writes out and taps
void pool_max_backward(const ops::MaxProblem& problem);  // writes in
void pool_max_pick(const ops::MaxProblem& problem);      // writes out

}  // namespace pydist::cpu

namespace pydist::cuda {

void pool_sum_forward(const ops::PoolProblem& problem, const Queue& queue);
void pool_sum_backward(const ops::PoolProblem& problem, const Queue& queue);

void pool_max_forward(const ops::MaxProblem& problem, const Queue& queue);
void pool_max_backward(const ops::MaxProblem& problem, const Queue& queue);
void pool_max_pick(const ops::MaxProblem& problem, const Queue& queue);

}  // namespace pydist::cuda
