// Random numbers keyed by the index of an element in a global array.
#pragma once

#include "core/view.hpp"
#include "launch/device.hpp"
#include "ops/random/body.hpp"

namespace pydist::cpu {

// out[i] = U[0, 1) from Philox4x32-10 with `key`, counted by the index of lo + i in C order of
// `shape`. `out` is float32 or float64, with any strides.
void keyed_uniform(const TensorView& out, const ops::UniformKey& key, const Coords& lo,
                   const Coords& shape);

}  // namespace pydist::cpu

namespace pydist::cuda {

// The same numbers, bit by bit. A key in device memory is read when the kernel runs.
void keyed_uniform(const TensorView& out, const ops::UniformKey& key, const Coords& lo,
                   const Coords& shape, const Queue& queue);

}  // namespace pydist::cuda
