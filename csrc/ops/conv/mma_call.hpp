// How a boundary convolution on tensor cores is asked for.
#pragma once

namespace pydist::ops {

// How floats are multiplied: by their 10 leading bits of mantissa, or by 21 bits, in three
// products.
enum class ConvMath { kTf32, kTf32x3 };

// How a tensor-core kernel is called. `partial`: its workspace, null if it needs none.
struct MmaCall {
  ConvMath math;
  float* partial;
};

}  // namespace pydist::ops
