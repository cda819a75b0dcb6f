// Reductions over ranks in rank order, so that the bits do not depend on the computing rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/dtype.hpp"

namespace pydist::comm {

enum class ReduceOp : std::uint8_t { kSum, kMax, kMin };

constexpr std::string_view name_of(ReduceOp op) {
  return op == ReduceOp::kSum ? "sum" : op == ReduceOp::kMax ? "max" : "min";
}

// outputs[any][i] = ((inputs[0][i] op inputs[1][i]) op inputs[2][i]) ..., for i in [0, count).
// An output may be one of the inputs (at the same position) and must not overlap them otherwise.
// Half types accumulate in fp32 and round once; max and min propagate NaN; integers wrap. On bool,
// sum and max mean "any", min means "all".
void reduce(std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
            std::size_t count, DType dtype, ReduceOp op);

}  // namespace pydist::comm
