// The sources of each target of a pooling, and the sums of their lines along the width.
#pragma once

#include <algorithm>
#include <vector>

#include "ops/pool/isa_tables.hpp"
#include "ops/pool/sum_body.hpp"

namespace pydist::cpu {

inline constexpr index_t kMaxTaps = 16;  // of windows that are padded

// The sources of each target in `targets`.
template <ops::PoolOp kOp>
std::vector<PoolSpan> spans_of(const ops::PoolDim& dim, ops::Span targets) {
  std::vector<PoolSpan> spans;
  for (index_t t = targets.begin; t < targets.end; ++t) {
    const ops::Span sources = dim.sources_of<kOp>(t);
    spans.push_back({sources.begin, sources.end});
  }
  return spans;
}

// The sums of lines of targets from a buffer of lines of sources, in one of two ways:
// - `channels` > 1 are adjacent, and vectorized; each target sums its span of the line.
// - A single channel is vectorized along the width, for strides 1 and 2. Sources outside the array
//   are zeros in the buffer (padding), so all windows have the same number of taps (backward with
//   stride 2, all even and all odd ones do), and lanes need no bounds checks. The buffer's lines
//   are treated as one line.
//
// Forward, kernel 3, stride 2, padding 1 (origin = -1):
//   buffer     0 s0 s1 s2 s3 s4 ...      target 0 = [0 s0 s1], target 1 = [s1 s2 s3]
//   even       0 s1 s3 ...               odd = s0 s2 s4 ...
//   target j = even[j] + even[j + 1] + odd[j]: windows of stride 1 over both halves.
template <ops::PoolOp kOp>
struct WidthPlan {
  ops::Span targets;
  bool padded;                  // whether the second way is used
  ops::Span sources;            // that any target sums
  index_t origin;               // source position of a buffer line's element 0
  index_t pitch;                // positions of a buffer line
  index_t line_pitch;           // positions of a target line, some before the first target:
  index_t first = 0;            // its place
  std::vector<PoolSpan> spans;  // of each target, in a buffer line; empty if padded

  WidthPlan(const ops::PoolDim& dim, ops::Span reached, index_t channels)
      : targets(reached),
        padded(channels == 1 && !dim.is_adaptive() && dim.stride <= 2 && dim.kernel <= kMaxTaps),
        spans(spans_of<kOp>(dim, reached)) {
    sources = {spans.empty() ? 0 : spans.front().begin, spans.empty() ? 0 : spans.back().end};
    if (padded) {
      spans.clear();
      pad(dim);
      return;
    }
    origin = sources.begin;
    pitch = sources.size();
    line_pitch = targets.size();
    for (PoolSpan& span : spans) span = {span.begin - origin, span.end - origin};
  }

 private:
  // Line lengths that are multiples of the stride, so that a line's halves have one length.
  void pad(const ops::PoolDim& dim) {
    if constexpr (kOp == ops::PoolOp::kForward) {
      origin = targets.begin * dim.stride + dim.base;
      line_pitch = ceil_div((targets.size() - 1) * dim.stride + dim.kernel, dim.stride);
      pitch = line_pitch * dim.stride;
    } else {
      const index_t top = floor_div(targets.begin - dim.base, dim.stride);
      origin = top - (ceil_div(dim.kernel, dim.stride) - 1);
      pitch = floor_div(targets.end - 1 - dim.base, dim.stride) - origin + 1;
      line_pitch = pitch * dim.stride;
      first = targets.begin - dim.base - top * dim.stride;
    }
  }
};

}  // namespace pydist::cpu
