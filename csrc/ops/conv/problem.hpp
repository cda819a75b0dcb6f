// The definition of a boundary convolution, in local indices: shared by all backends.
//
// A convolution over a cut sample is the convolution of the rank's own shard, zero padded, plus the
// contributions of other ranks' slabs near the cut (docs/adr/0003). The kernels here add one slab:
//
//   forward:  out[o]     += sum_k weight[k] * in[i]     `in` is the slab, `out` the rank's output
//   dgrad:    in[i]      += sum_k weight[k] * out[o]    `out` is a slab of dL/dout, `in` dL/din
//   wgrad:    weight[k]  += sum_o in[i] * out[o]        `in` is the slab, `out` dL/dout
//
// with i = o * stride + k * dilation + base in each dim, over all indices inside the two arrays. A
// slab is thin in one dim, so it reaches few planes of the other array, and only those are touched.
#pragma once

#include "core/view.hpp"
#include "launch/host_device.hpp"
#include "ops/common/array.hpp"

namespace pydist::ops {

// One spatial dim: output o and kernel index k read the input o * stride + k * dilation + base.
// Inputs and outputs outside the given arrays are ignored.
struct ConvDim {
  index_t base;  // out_lo * stride - padding - in_lo
  index_t stride, dilation, kernel;
  index_t in_extent, out_extent;
};

// out[n, g, co, o] += sum_{ci, k} weight[g, co, ci, k] * in[n, g, ci, o * stride + k * dilation +
// base] and its two adjoints. Which of the arrays is written depends on the operation.
struct ConvProblem {
  DType dtype;
  index_t batch, groups;
  index_t in_channels, out_channels;  // of one group
  ConvDim dims[kSpatialDims];
  SpatialArray in, weight, out;
};

// Attributes of a convolution and the global position of its two arrays.
struct ConvAttributes {
  Coords in_lo, out_lo;
  Coords stride, padding, dilation;
  index_t groups;
};

// The views must have passed the border's checks.
inline ConvProblem conv_problem(const TensorView& in, const TensorView& weight,
                                const TensorView& out, const ConvAttributes& attributes) {
  ConvProblem problem{};
  problem.dtype = in.dtype;
  problem.batch = in.shape[0];
  problem.groups = attributes.groups;
  problem.in_channels = weight.shape[1];
  problem.out_channels = weight.shape[0] / attributes.groups;
  for (int dim = 0; dim < kSpatialDims; ++dim) {
    problem.dims[dim] = {attributes.out_lo[dim] * attributes.stride[dim] - attributes.padding[dim] -
                             attributes.in_lo[dim],
                         attributes.stride[dim],
                         attributes.dilation[dim],
                         weight.shape[2 + dim],
                         in.shape[2 + dim],
                         out.shape[2 + dim]};
  }
  problem.in = spatial_array(in);
  problem.weight = spatial_array(weight);
  problem.out = spatial_array(out);
  return problem;
}

}  // namespace pydist::ops
