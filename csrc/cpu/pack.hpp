// pack, unpack and unpack_add on the CPU. Views and buffers must have passed the border's checks.
#pragma once

#include "core/view.hpp"
#include "kernels/regions.hpp"

namespace pydist::cpu {

// buffer <- the boxes of `src`.
void pack(const TensorView& src, const kernels::Regions& regions, const TensorView& buffer);
// The boxes of `dst` <- buffer. Where boxes overlap, the last one stays.
void unpack(const TensorView& buffer, const kernels::Regions& regions, const TensorView& dst);
// The boxes of `dst` += buffer, box after box where they overlap.
void unpack_add(const TensorView& buffer, const kernels::Regions& regions, const TensorView& dst);

}  // namespace pydist::cpu
