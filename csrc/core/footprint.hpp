// Footprint: which inputs an interval of outputs needs, along one dim.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/index.hpp"
#include "core/partition.hpp"

namespace pydist {

// Output o reads the inputs o * stride - padding_lo + k * dilation, 0 <= k < kernel.
// Intervals are not clipped: what lies outside the domain is padding. Convolution arithmetic as in
// Dumoulin & Visin (2016), arXiv:1603.07285. Negative padding crops.
class Footprint {
 public:
  Footprint(index_t kernel, index_t stride = 1, index_t dilation = 1, index_t padding_lo = 0,
            index_t padding_hi = 0)
      : kernel_(kernel),
        stride_(stride),
        dilation_(dilation),
        padding_lo_(padding_lo),
        padding_hi_(padding_hi) {
    PYDIST_EXPECT(kernel >= 1 && stride >= 1 && dilation >= 1,
                  "kernel " + std::to_string(kernel) + ", stride " + std::to_string(stride) +
                      ", dilation " + std::to_string(dilation) + ": all must be at least 1");
    span_ = checked_add(checked_mul(kernel - 1, dilation), 1);
  }

  index_t kernel() const { return kernel_; }
  index_t stride() const { return stride_; }
  index_t dilation() const { return dilation_; }
  index_t padding_lo() const { return padding_lo_; }
  index_t padding_hi() const { return padding_hi_; }

  // Number of outputs of an input with `extent` indices; 0 if the kernel does not fit.
  index_t output_extent(index_t extent) const {
    PYDIST_EXPECT(extent >= 0, "negative extent " + std::to_string(extent));
    const index_t padded = checked_add(checked_add(extent, padding_lo_), padding_hi_);
    return padded < span_ ? 0 : (padded - span_) / stride_ + 1;
  }

  // The inputs that the outputs [lo, hi) read, as the smallest interval.
  Interval needs(index_t lo, index_t hi) const {
    const index_t first = checked_sub(checked_mul(lo, stride_), padding_lo_);
    if (lo >= hi) return {first, first};
    const index_t last = checked_sub(checked_mul(hi - 1, stride_), padding_lo_);
    return {first, checked_add(last, span_)};
  }

  // The outputs whose needs meet the inputs [lo, hi): the adjoint of `needs`. A dilated kernel
  // counts as reading the whole interval that it spans.
  Interval feeds(index_t lo, index_t hi) const {
    const index_t first = floor_div(checked_sub(checked_add(lo, padding_lo_), span_), stride_) + 1;
    if (lo >= hi) return {first, first};
    return {first, std::max(first, ceil_div(checked_add(hi, padding_lo_), stride_))};
  }

  // Gives each output to the part that holds the input at its kernel's centre (clamped to the
  // domain), so that halos come from both sides alike and a strided layer stays in place.
  Partition output_partition(const Partition& input) const {
    const index_t outputs = output_extent(input.extent());
    const index_t centre = (span_ - 1) / 2 - padding_lo_;
    std::vector<index_t> points;
    for (const index_t point : input.points()) {
      index_t split = std::clamp<index_t>(ceil_div(point - centre, stride_), 0, outputs);
      if (point == 0) split = 0;
      if (point == input.extent() && point > 0) split = outputs;
      points.push_back(split);
    }
    points.back() = outputs;
    return Partition(std::move(points));
  }

  friend bool operator==(const Footprint&, const Footprint&) = default;

 private:
  index_t kernel_, stride_, dilation_, padding_lo_, padding_hi_;
  index_t span_ = 1;
};

}  // namespace pydist
