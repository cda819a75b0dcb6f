// wgrad of channels-last arrays, read where they lie.
#pragma once

#include "ops/conv/problem.hpp"

namespace pydist::cpu {

// Adds to the weight, as `boundary_conv_wgrad`; false if the arrays do not lie so, or if the form
// that copies them suits the shape better. The result does not depend on the number of threads.
bool add_wgrad_by_rows(const ops::ConvProblem& problem);

}  // namespace pydist::cpu
