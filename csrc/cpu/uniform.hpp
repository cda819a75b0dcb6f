// Keyed random numbers on the CPU.
#pragma once

#include "core/view.hpp"
#include "kernels/uniform.hpp"

namespace pydist::cpu {

// out[i] = U[0, 1) from Philox4x32-10 with `key`, counted by the index of lo + i in C order of
// `shape`. `out` is float32 or float64, with any strides.
void keyed_uniform(const TensorView& out, const kernels::UniformKey& key, const Coords& lo,
                   const Coords& shape);

}  // namespace pydist::cpu
