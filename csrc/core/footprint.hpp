// Footprint: the inputs that an interval of outputs needs, along one dim.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/index.hpp"
#include "core/partition.hpp"

namespace pydist {

// Output o reads the inputs o * stride - padding_lo + k * dilation, 0 <= k < kernel.
// Intervals are not clipped: inputs outside the domain are padding. Convolution arithmetic as in
// Dumoulin & Visin (2016), arXiv:1603.07285. Negative padding crops.
//
// An adaptive footprint cuts a dim of `inputs` into `outputs` windows of almost equal length, which
// may overlap: output o reads [floor(o * inputs / outputs), ceil((o + 1) * inputs / outputs)).
class Footprint {
 public:
  // All in elements of the dim; `padding_lo` and `padding_hi` before and after it. Throws
  // UsageError unless kernel, stride and dilation are at least 1.
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

  // Scans the outputs once for the longest window.
  static Footprint adaptive(index_t inputs, index_t outputs) {
    PYDIST_EXPECT(inputs >= 1 && outputs >= 1, "adaptive windows from " + std::to_string(inputs) +
                                                   " inputs to " + std::to_string(outputs) +
                                                   " outputs: both must be at least 1");
    checked_mul(inputs, checked_add(outputs, 1));
    Footprint footprint(1, std::max<index_t>(inputs / outputs, 1));
    footprint.inputs_ = inputs;
    footprint.outputs_ = outputs;
    for (index_t o = 0; o < outputs; ++o) {
      footprint.kernel_ = std::max(footprint.kernel_, footprint.end(o) - footprint.first(o));
    }
    return footprint;
  }

  // Of adaptive windows: the longest length, and the steps between windows, rounded down.
  index_t kernel() const { return kernel_; }
  index_t stride() const { return stride_; }
  index_t dilation() const { return dilation_; }
  index_t padding_lo() const { return padding_lo_; }
  index_t padding_hi() const { return padding_hi_; }
  bool is_adaptive() const { return outputs_ > 0; }
  index_t inputs() const { return inputs_; }    // 0 if not adaptive
  index_t outputs() const { return outputs_; }  // 0 if not adaptive

  // The first input that an output reads, and the one past its last. Both are defined for every o:
  // an output outside of the domain has a window, too.
  index_t first(index_t o) const {
    if (is_adaptive()) return floor_div(checked_mul(o, inputs_), outputs_);
    return checked_sub(checked_mul(o, stride_), padding_lo_);
  }
  index_t end(index_t o) const {
    if (is_adaptive()) return ceil_div(checked_mul(checked_add(o, 1), inputs_), outputs_);
    return checked_add(first(o), span_);
  }

  // Number of outputs of an input with `extent` indices; 0 if the kernel does not fit.
  index_t output_extent(index_t extent) const {
    PYDIST_EXPECT(extent >= 0, "negative extent " + std::to_string(extent));
    if (is_adaptive()) {
      PYDIST_EXPECT(extent == inputs_, "adaptive windows of " + std::to_string(inputs_) +
                                           " inputs given an extent of " + std::to_string(extent));
      return outputs_;
    }
    const index_t padded = checked_add(checked_add(extent, padding_lo_), padding_hi_);
    return padded < span_ ? 0 : (padded - span_) / stride_ + 1;
  }

  // The inputs that the outputs [lo, hi) read, as the smallest interval. Without outputs it is
  // empty, at the first input that output lo would read.
  Interval needs(index_t lo, index_t hi) const {
    if (lo >= hi) return {first(lo), first(lo)};
    return {first(lo), end(hi - 1)};
  }

  // The outputs whose needs intersect the inputs [lo, hi): the adjoint of `needs`. A dilated kernel
  // counts as reading the full interval that it spans.
  //
  // Output o spans [first(o), end(o)). So the result begins with the smallest o that has
  // end(o) > lo, and ends before the smallest o that has first(o) >= hi.
  Interval feeds(index_t lo, index_t hi) const {
    if (is_adaptive()) {
      const index_t start = floor_div(checked_mul(lo, outputs_), inputs_);
      if (lo >= hi) return {start, start};
      return {start, ceil_div(checked_mul(hi, outputs_), inputs_)};
    }
    const index_t first = floor_div(checked_sub(checked_add(lo, padding_lo_), span_), stride_) + 1;
    if (lo >= hi) return {first, first};
    return {first, std::max(first, ceil_div(checked_add(hi, padding_lo_), stride_))};
  }

  // Assigns each output to the part that holds the input at its kernel's center (clamped to the
  // domain), so that halos on both sides are equally wide and a strided layer stays in place. Empty
  // parts at either end of the domain stay empty. Without inputs, the last part has all outputs.
  Partition output_partition(const Partition& input) const {
    const index_t outputs = output_extent(input.extent());
    std::vector<index_t> points;
    for (const index_t point : input.points()) {
      index_t split = std::clamp<index_t>(first_centered_at(point), 0, outputs);
      if (point == 0) split = 0;
      if (point == input.extent() && point > 0) split = outputs;
      points.push_back(split);
    }
    points.back() = outputs;
    return Partition(std::move(points));
  }

  friend bool operator==(const Footprint&, const Footprint&) = default;

 private:
  // The first output with its center at `point` or after it.
  index_t first_centered_at(index_t point) const {
    if (!is_adaptive()) return ceil_div(point - (span_ - 1) / 2 + padding_lo_, stride_);
    index_t o = floor_div(checked_mul(point, outputs_), inputs_);  // its window contains the point
    while (o > 0 && (first(o - 1) + end(o - 1) - 1) / 2 >= point) --o;
    while (o < outputs_ && (first(o) + end(o) - 1) / 2 < point) ++o;
    return o;
  }

  index_t kernel_, stride_, dilation_, padding_lo_, padding_hi_;
  index_t span_ = 1;                  // inputs from the first tap to the last one, both included
  index_t inputs_ = 0, outputs_ = 0;  // of adaptive windows, whose span_ is not used
};

}  // namespace pydist
