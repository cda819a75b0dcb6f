// The choice of the instance of mma_body.hpp for a problem: by dtype, by the products of floats,
// and by columns, as narrow tiles waste less with few channels.
//
// Traffic: a tile of 64 x 32 reads 1/64 + 1/32 elements per multiply-add, one of 64 x 64 only 1/64
// +
//   1/64. But there are twice as many of the narrow ones, and a wide one with fewer than 33 columns
//   would be half empty.
// Each output is in one tile of either width. The choice depends on the problem and not on the
// device, and so does the order of every sum.
// Proof: tests/native/test_conv_mma.cpp runs both widths, tests/gpu/test_conv_gpu.py the choice.
#pragma once

#include <string>
#include <type_traits>

#include "ops/common/dispatch.hpp"
#include "ops/conv/mma_body.hpp"
#include "ops/conv/mma_call.hpp"

namespace pydist::ops {

// The reason why a problem has no tensor-core kernel; empty if it has one.
template <ConvOp kOp>
std::string mma_refusal(const ConvProblem& problem) {
  if (problem.dtype == DType::kFloat64) return "float64";
  return ConvGather<kOp>::refusal(problem);
}

inline constexpr index_t kManyTiles = 132;  // one for each multiprocessor of an H100

// Calls f(std::type_identity<Body>{}) with the body for a problem that is not refused.
template <ConvOp kOp, class F>
void with_mma_body(const ConvProblem& problem, ConvMath math, const F& f) {
  const index_t columns = kOp == ConvOp::kDgrad ? problem.in_channels : problem.out_channels;
  dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
    if constexpr (std::is_same_v<Storage, double>) {
      throw InternalError("no tensor-core kernel for float64");
    } else {
      const auto narrow_or_wide = [&]<ConvMath kMath>() {
        using Narrow = ConvMmaBody<kOp, Storage, kMath, 32>;
        using Wide = ConvMmaBody<kOp, Storage, kMath, 64>;
        // Wgrad has enough blocks by splits, and finds positions once in wide tiles.
        const bool few = kOp != ConvOp::kWgrad && Wide::make(problem, nullptr).tiles() < kManyTiles;
        if (columns <= Narrow::kColumns || few) {
          return f(std::type_identity<Narrow>{});
        }
        return f(std::type_identity<Wide>{});
      };
      if constexpr (std::is_same_v<Storage, float>) {
        if (math == ConvMath::kTf32x3) {
          return narrow_or_wide.template operator()<ConvMath::kTf32x3>();
        }
      }
      return narrow_or_wide.template operator()<ConvMath::kTf32>();
    }
  });
}

}  // namespace pydist::ops
