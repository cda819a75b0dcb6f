// Boundary convolution: adds a halo slab's contribution to a convolution and to its gradients.
//
// The cost follows the boundary planes that the slab reaches, not the full output. Results
// do not depend on the number of threads: every element is summed by one task, in a fixed order.
#pragma once

#include <optional>

#include "launch/device.hpp"
#include "ops/conv/mma_call.hpp"
#include "ops/conv/problem.hpp"

namespace pydist::cpu {

void boundary_conv_forward(const ops::ConvProblem& problem);  // writes out
void boundary_conv_dgrad(const ops::ConvProblem& problem);    // writes in
void boundary_conv_wgrad(const ops::ConvProblem& problem);    // writes weight

}  // namespace pydist::cpu

namespace pydist::cuda {

// On tensor cores if `mma` is given; the problem must not be refused by mma_refusal
// (mma_choice.hpp). Else by the tiled body, for every dtype. The host does not wait for the device.
using MmaCall = std::optional<ops::MmaCall>;
void boundary_conv_forward(const ops::ConvProblem& problem, const MmaCall& mma, const Queue& queue);
void boundary_conv_dgrad(const ops::ConvProblem& problem, const MmaCall& mma, const Queue& queue);
void boundary_conv_wgrad(const ops::ConvProblem& problem, const MmaCall& mma, const Queue& queue);

}  // namespace pydist::cuda
