// From stored numbers to a network's input on the CPU; see kernels/convert.hpp.
#pragma once

#include "core/view.hpp"

namespace pydist::cpu {

// out[c, i] = table[c, bits of stored[c, i]] / divisor; `found` becomes 1 where that is not finite.
void look_up(const TensorView& stored, const TensorView& table, double divisor,
             const TensorView& out, const TensorView& found);

// out[c, i] = stored[c, i], clipped, its log1p if wanted, shifted and
// scaled by maps[c], / divisor.
void rescale(const TensorView& stored, const TensorView& maps, bool log, double divisor,
             const TensorView& out, const TensorView& found);

}  // namespace pydist::cpu
