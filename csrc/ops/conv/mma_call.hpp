// The arguments of a boundary convolution on tensor cores.
#pragma once

namespace pydist::ops {

// The products of floats: with 10 leading bits of mantissa, or with 21 bits, in three products.
enum class ConvMath { kTf32, kTf32x3 };

// The call of a tensor-core kernel. `partial`: its workspace, null if it needs none.
//
// Where sums are split into parts (MmaSplits), the workspace has ConvMmaBody::partial_elements()
// floats, [part, group, m, n]. The first launch writes each of them once, in the block whose share
// of the tile's rows has it; the second reads each once (ConvPartialBody). Without parts a block
// adds its sums to the target itself.
// Traffic: 8 bytes per part and output, beside that of the products (mma_body.hpp).
// Proof: tests/native/test_conv_mma.cpp, which fills the workspace with NaN before.
struct MmaCall {
  ConvMath math;
  float* partial;
};

}  // namespace pydist::ops
