// Norms with an activation after them; problem.hpp has the formulas of the passes, rows_body.hpp
// those between the passes.
//
// Results do not depend on the number of threads: sums are formed by parts of the positions, and
// merged in their order. CPU and devices sum in different orders: their results differ by rounding.
#pragma once

#include "launch/device.hpp"
#include "ops/norm/problem.hpp"
#include "ops/norm/rows_body.hpp"

namespace pydist::cpu {

void norm_moments(const ops::NormProblem& problem);     // reads x once; writes sums
void norm_apply(const ops::NormProblem& problem);       // reads x once; writes out
void norm_grad_sums(const ops::NormProblem& problem);   // reads x, grad once; writes sums
void norm_grad_input(const ops::NormProblem& problem);  // reads x, grad once; writes out

void norm_merge_parts(const ops::NormParts& parts);
void norm_values(const ops::NormRows& norm);        // from moments, scale, shift
void norm_totals(const ops::NormRows& norm);        // from moments, scale, values, sums
void norm_coefficients(const ops::NormRows& norm);  // from moments, scale, values, totals
void norm_slopes(const ops::NormRows& norm);

}  // namespace pydist::cpu

namespace pydist::cuda {

void norm_moments(const ops::NormProblem& problem, const Queue& queue);
void norm_apply(const ops::NormProblem& problem, const Queue& queue);
void norm_grad_sums(const ops::NormProblem& problem, const Queue& queue);
void norm_grad_input(const ops::NormProblem& problem, const Queue& queue);

void norm_merge_parts(const ops::NormParts& parts, const Queue& queue);
void norm_values(const ops::NormRows& norm, const Queue& queue);
void norm_totals(const ops::NormRows& norm, const Queue& queue);
void norm_coefficients(const ops::NormRows& norm, const Queue& queue);
void norm_slopes(const ops::NormRows& norm, const Queue& queue);

}  // namespace pydist::cuda
