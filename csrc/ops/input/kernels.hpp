// Converts stored values to a network's input in one pass; body.hpp has the formulas.
#pragma once

#include "core/view.hpp"
#include "launch/device.hpp"

namespace pydist::cpu {

// out[c, i] = table[c, bits of stored[c, i]] / divisor; `found` becomes 1 if that is not finite.
void look_up(const TensorView& stored, const TensorView& table, double divisor,
             const TensorView& out, const TensorView& found);

// out[c, i] = stored[c, i], clipped, its log1p if wanted, shifted and scaled by maps[c], / divisor.
void rescale(const TensorView& stored, const TensorView& maps, bool log, double divisor,
             const TensorView& out, const TensorView& found);

}  // namespace pydist::cpu

namespace pydist::cuda {

// As on the CPU: look_up returns the same bits, rescale is within the error of log1p_of
// (rescaled.hpp). `table` and `maps` are in device memory.
void look_up(const TensorView& stored, const TensorView& table, double divisor,
             const TensorView& out, const TensorView& found, const Queue& queue);
void rescale(const TensorView& stored, const TensorView& maps, bool log, double divisor,
             const TensorView& out, const TensorView& found, const Queue& queue);

}  // namespace pydist::cuda
