// The three boundary convolutions, and the indices that they use.
//
// For kernel index k, output o reads the input o * stride + k * dilation + base. The outputs that a
// slab reaches by any k are an interval per dim, and so are the inputs and the kernel indices:
// kernels run over these boxes instead of full arrays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ops/conv/problem.hpp"

namespace pydist::ops {

enum class ConvOp { kForward, kDgrad, kWgrad };

// An interval [first, first + count) of indices along one dim.
struct Reach {
  std::int32_t first, count;
};

// The outputs, inputs and kernel indices of one dim that contribute.
struct DimReach {
  Reach out, in, kernel;
};

inline DimReach reach_of(const ConvDim& dim) {
  index_t lo[3], hi[3] = {0, 0, 0};
  std::fill_n(lo, 3, std::numeric_limits<index_t>::max());
  const auto include = [&](int i, index_t first, index_t last) {
    lo[i] = std::min(lo[i], first);
    hi[i] = std::max(hi[i], last + 1);
  };
  for (index_t k = 0; k < dim.kernel; ++k) {
    const index_t shift = k * dim.dilation + dim.base;
    const index_t first = std::max<index_t>(0, ceil_div(-shift, dim.stride));
    const index_t last = std::min(dim.out_extent, ceil_div(dim.in_extent - shift, dim.stride)) - 1;
    if (first > last) continue;
    include(0, first, last);
    include(1, first * dim.stride + shift, last * dim.stride + shift);
    include(2, k, k);
  }
  const auto reach = [&](int i) {
    if (hi[i] == 0) return Reach{0, 0};
    return Reach{static_cast<std::int32_t>(lo[i]), static_cast<std::int32_t>(hi[i] - lo[i])};
  };
  return {reach(0), reach(1), reach(2)};
}

}  // namespace pydist::ops
