// wgrad of channels-last arrays, read in place: one of the forms of cpu_wgrad.cpp.
#pragma once

#include "ops/conv/problem.hpp"

namespace pydist::cpu {

// Adds to the weight, as `boundary_conv_wgrad`; false if the arrays have another layout, or if a
// form that copies them is better for the shape. The result does not depend on the number of
// threads.
bool add_wgrad_by_rows(const ops::ConvProblem& problem);

}  // namespace pydist::cpu
