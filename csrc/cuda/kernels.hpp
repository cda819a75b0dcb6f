// The kernels on CUDA devices; the same bodies as on the CPU. Views must have passed the border's
// checks and lie on the queue's device.
#pragma once

#include <cstdint>
#include <optional>

#include "core/view.hpp"
#include "cuda/device.hpp"
#include "kernels/conv_mma_choice.hpp"
#include "kernels/norm.hpp"
#include "kernels/norm_rows.hpp"
#include "kernels/pool.hpp"
#include "kernels/pool_max.hpp"
#include "kernels/regions.hpp"
#include "kernels/uniform.hpp"

namespace pydist::cuda {

void pack(const TensorView& src, const kernels::Regions& regions, const TensorView& buffer,
          const Queue& queue);
void unpack(const TensorView& buffer, const kernels::Regions& regions, const TensorView& dst,
            const Queue& queue);
void unpack_add(const TensorView& buffer, const kernels::Regions& regions, const TensorView& dst,
                const Queue& queue);

// On tensor cores if it is said how, and then the problem must not be one that they refuse.
using MmaCall = std::optional<kernels::MmaCall>;
void boundary_conv_forward(const kernels::ConvProblem& problem, const MmaCall& mma,
                           const Queue& queue);
void boundary_conv_dgrad(const kernels::ConvProblem& problem, const MmaCall& mma,
                         const Queue& queue);
void boundary_conv_wgrad(const kernels::ConvProblem& problem, const MmaCall& mma,
                         const Queue& queue);

void norm_moments(const kernels::NormProblem& problem, const Queue& queue);
void norm_apply(const kernels::NormProblem& problem, const Queue& queue);
void norm_grad_sums(const kernels::NormProblem& problem, const Queue& queue);
void norm_grad_input(const kernels::NormProblem& problem, const Queue& queue);
void norm_merge_parts(const kernels::NormParts& parts, const Queue& queue);
void norm_values(const kernels::NormRows& norm, const Queue& queue);
void norm_totals(const kernels::NormRows& norm, const Queue& queue);
void norm_coefficients(const kernels::NormRows& norm, const Queue& queue);
void norm_slopes(const kernels::NormRows& norm, const Queue& queue);

void pool_sum_forward(const kernels::PoolProblem& problem, const Queue& queue);
void pool_sum_backward(const kernels::PoolProblem& problem, const Queue& queue);

void pool_max_forward(const kernels::MaxProblem& problem, const Queue& queue);
void pool_max_backward(const kernels::MaxProblem& problem, const Queue& queue);
void pool_max_pick(const kernels::MaxProblem& problem, const Queue& queue);

void keyed_uniform(const TensorView& out, const kernels::UniformKey& key, const Coords& lo,
                   const Coords& shape, const Queue& queue);

void look_up(const TensorView& stored, const TensorView& table, double divisor,
             const TensorView& out, const TensorView& found, const Queue& queue);
void rescale(const TensorView& stored, const TensorView& maps, bool log, double divisor,
             const TensorView& out, const TensorView& found, const Queue& queue);

}  // namespace pydist::cuda
