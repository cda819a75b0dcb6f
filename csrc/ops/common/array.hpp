// Arrays of samples with channels and three spatial dims, as passed to kernels.
#pragma once

#include "core/view.hpp"

namespace pydist::ops {

inline constexpr int kSpatialDims = 3;

// An array [batch, channels, 3 spatial dims], or a weight [out, in / groups, 3 kernel dims].
// Strides in elements. Plain data, passed to a device by value.
struct SpatialArray {
  void* data;
  index_t strides[2 + kSpatialDims];
};

inline SpatialArray spatial_array(const TensorView& view) {
  SpatialArray array{view.data, {}};
  for (int dim = 0; dim < view.ndim(); ++dim) array.strides[dim] = view.strides[dim];
  return array;
}

}  // namespace pydist::ops
