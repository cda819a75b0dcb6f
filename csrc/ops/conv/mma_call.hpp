// The arguments of a boundary convolution on tensor cores.
#pragma once

namespace pydist::ops {

// The products of floats: with 10 leading bits of mantissa, or with 21 bits, in three products.
enum class ConvMath { kTf32, kTf32x3 };

// The call of a tensor-core kernel. `partial`: its workspace, null if it needs none.
struct MmaCall {
  ConvMath math;
  float* partial;
};

}  // namespace pydist::ops
