// The second stage of a boundary convolution on tensor cores with split sums (mma_body.hpp).
#pragma once

#include <cstdint>

#include "core/index.hpp"
#include "launch/decomposition.hpp"

namespace pydist::ops {

// Adds up the parts of a boundary convolution whose sums were split.
//
// Index formula: target[m, n] += sum_part partial[part, group, m, n], in order.
// Threads: a warp (or less) per row, which is one (group, m); neighboring lanes take neighboring n.
// Traffic: 4 bytes per part and output, one element read and one written per output.
// Proof: tests/native/test_conv_mma.cpp, with problems that are split.
template <class Conv>
struct ConvPartialBody {
  static constexpr int kRunBlocks = 3;  // values that are read ahead need registers

  Conv conv;

  struct Row {
    std::int32_t group, m;
  };

  PYDIST_HD index_t rows() const {
    return conv.splits.parts < 2 ? 0 : conv.gather.problem.groups * conv.m_extent;
  }
  PYDIST_HD Row row(index_t r) const {
    return {static_cast<std::int32_t>(r / conv.m_extent),
            static_cast<std::int32_t>(r % conv.m_extent)};
  }
  template <class Loop>
  PYDIST_HD void each(const Row& row, const Loop& loop) const {
    auto* const target = conv.target() + conv.target_offset(row.group, row.m);
    const float* const parts = conv.partial + conv.partial_row(0, row.group, row.m);
    const index_t step = conv.partial_row(1, 0, 0);
    loop(conv.n_extent, [&](index_t n) {
      auto& element = target[n * conv.target_stride()];
      const auto before = element;
      float sum = 0;
      launch::LaneLoop{0, 1}(conv.splits.parts,
                             launch::Move{[=](index_t part) { return parts[part * step + n]; },
                                          [&](index_t, float part) { sum += part; }});
      element = conv.finished(before, sum);
    });
  }
};

}  // namespace pydist::ops
