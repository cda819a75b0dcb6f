// Converts boxes to runs: elements of a view and of a buffer that are copied together.
//
// A box of a strided view is a nest of loops. The table picks the loop that becomes the run (one
// contiguous or strided copy), orders the others by the view's strides, and cuts long runs into
// segments, so that a launcher can give any row to any thread:
//
//   row r  =  segment number * outer_rows + outer index        (outer dims in C order)
//   first byte of unit j of row r, in the view:
//       view_offset + sum_d index_d * outer_view_stride[d] + (segment start + j) * view_stride
//   in the buffer: the same with buffer_offset and the buffer's strides.
//
// A unit is contiguous on both sides, and moved as one word or several. A D face of a [C, D, H, W]
// array is C rows of H * W elements; an H face, C * D rows of W; a W face in C order has single
// elements, so its run goes along H with a stride, unless a few neighbors along W can be moved as
// one word of up to 16 bytes.
//
// On a device, a row of W elements is too short: finding it takes as long as copying it, and each
// lane has one or two words to read ahead. There short pieces (a row of an H face; the channels of
// one voxel, in a W face with channels last) are the units of a longer run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/view.hpp"
#include "launch/host_device.hpp"
#include "ops/common/divisor.hpp"
#include "ops/pack/regions.hpp"

namespace pydist::ops {

// One box as rows of runs. Plain data, passed to a device by value. Offsets and strides are in
// bytes. Row r = segment number * outer_rows + outer index, whose last dim varies fastest.
struct RunBox {
  index_t first_row;
  index_t view_offset, buffer_offset;
  index_t extent;                      // units along the run dim
  index_t segment;                     // units of one run; the last segment may be shorter
  index_t outer_rows;                  // product of the outer extents
  index_t view_stride, buffer_stride;  // along the run dim
  Divisor words;                       // of a unit
  std::int16_t word;                   // bytes that are moved as one
  std::int16_t outer_dims;
  index_t outer_extent[kMaxDims - 1];
  index_t outer_view_stride[kMaxDims - 1];
  index_t outer_buffer_stride[kMaxDims - 1];

  index_t unit() const { return index_t{words.divisor} * word; }  // bytes
};

// One run of `length` units.
struct Run {
  index_t view, buffer;  // byte offsets of its first unit
  index_t length;
  index_t view_stride, buffer_stride;
  Divisor words;
  std::int32_t word;

  PYDIST_HD index_t unit() const { return index_t{words.divisor} * word; }  // bytes
  PYDIST_HD bool contiguous() const { return view_stride == unit() && buffer_stride == unit(); }
};

// The row's run: a binary search over the boxes, then one division per outer dim except the first.
// This is all index arithmetic of a row, for some 100 copied bytes or more. (nvcc divides in 32
// bits where both numbers fit, which it tests at run time.)
PYDIST_HD Run find_run(const RunBox* boxes, int count, index_t r) {
  int lo = 0, hi = count;
  while (hi - lo > 1) {
    const int middle = (lo + hi) / 2;
    if (boxes[middle].first_row <= r) {
      lo = middle;
    } else {
      hi = middle;
    }
  }
  const RunBox& box = boxes[lo];
  index_t rest = r - box.first_row;
  Run run{box.view_offset,   box.buffer_offset, box.extent, box.view_stride,
          box.buffer_stride, box.words,         box.word};
  if (box.extent > box.segment) {
    const index_t number = rest / box.outer_rows;
    const index_t start = number * box.segment;
    rest -= number * box.outer_rows;
    run.view += start * box.view_stride;
    run.buffer += start * box.buffer_stride;
    run.length = box.extent - start < box.segment ? box.extent - start : box.segment;
  }
  for (int dim = box.outer_dims - 1; dim >= 0; --dim) {
    const index_t above = dim > 0 ? rest / box.outer_extent[dim] : 0;
    const index_t index = rest - above * box.outer_extent[dim];
    run.view += index * box.outer_view_stride[dim];
    run.buffer += index * box.outer_buffer_stride[dim];
    rest = above;
  }
  return run;
}

// A launcher's requirements on runs.
struct RunOptions {
  index_t segment_bytes;  // longest run
  bool fuse;              // may move several adjacent elements as one word (plain copies only)
  bool pieces = false;    // a unit may be a short piece of several words (devices only)
  const void* buffer = nullptr;  // where it starts: a slice of a buffer limits the words
};

// Long enough to be a copy at memory speed, short enough to spread a face over the threads.
inline constexpr index_t kCpuSegmentBytes = 64 * 1024;
// Eight 16-byte accesses per lane: a D face of 128 x 128 floats gives 16 warps, not one.
inline constexpr index_t kCudaSegmentBytes = 4 * 1024;
// One access per lane.
inline constexpr index_t kCudaShortestSegment = 512;
// A launch with so many rows has 16 warps for each multiprocessor of a large device.
inline constexpr index_t kCudaRows = 2048;

// Segments of a launch that moves so many bytes: a small face is spread over the device, too.
inline index_t cuda_segment(index_t bytes) {
  index_t segment = kCudaSegmentBytes;
  while (segment > kCudaShortestSegment && bytes < segment * kCudaRows) segment /= 2;
  return segment;
}

// The runs of some boxes over one view and its buffer. A table depends only on the alignment of the
// addresses, so that it serves all views of the same dtype, strides and alignment.
class RunTable {
 public:
  RunTable(const TensorView& view, const Regions& regions, Regions::Group group,
           const RunOptions& options)
      : size_(size_of(view.dtype)) {
    for (std::size_t i = group.begin; i < group.end; ++i) {
      if (!regions.parts()[i].box.empty()) add(view, regions.parts()[i], options);
    }
  }

  const std::vector<RunBox>& boxes() const { return boxes_; }
  index_t rows() const { return rows_; }
  index_t bytes() const { return bytes_; }  // of the view's elements in the boxes
  // Whether they are a single piece of memory, in the view as in the buffer.
  bool contiguous() const {
    if (boxes_.size() != 1) return false;
    const RunBox& box = boxes_.front();
    return box.outer_dims == 0 && box.view_stride == box.unit() && box.buffer_stride == box.unit();
  }

 private:
  struct Dim {
    index_t extent, view_stride, buffer_stride;  // strides in bytes
  };

  void add(const TensorView& view, const Regions::Part& part, const RunOptions& options) {
    RunBox box{};
    std::vector<Dim> dims = coalesce(view.strides, part.box);
    box.word = static_cast<std::int16_t>(size_);
    box.words = Divisor::by(1);
    box.first_row = rows_;
    box.buffer_offset = part.offset * size_;
    for (int dim = 0; dim < part.box.ndim(); ++dim) {
      box.view_offset += part.box.lo()[dim] * view.strides[dim] * size_;
    }
    join(view.data, options, dims, box);
    take_run_dim(options.segment_bytes, dims, box);
    // The dim with the smallest stride in the view varies fastest, so that rows share cache lines.
    std::ranges::stable_sort(dims, std::greater{}, &Dim::view_stride);
    box.outer_rows = 1;
    for (const Dim& dim : dims) {
      box.outer_extent[box.outer_dims] = dim.extent;
      box.outer_view_stride[box.outer_dims] = dim.view_stride;
      box.outer_buffer_stride[box.outer_dims] = dim.buffer_stride;
      ++box.outer_dims;
      box.outer_rows *= dim.extent;
    }
    rows_ += box.outer_rows * ceil_div(box.extent, box.segment);
    bytes_ += part.box.volume() * size_;
    boxes_.push_back(box);
  }

  // The box's dims, outermost first, without extents of 1. Two neighboring dims become one if a
  // single stride walks both in the view; in the buffer it always does.
  std::vector<Dim> coalesce(const Coords& strides, const Box& box) const {
    std::vector<Dim> dims;
    index_t buffer_stride = box.volume() * size_;
    for (int dim = 0; dim < box.ndim(); ++dim) {
      const index_t extent = box.hi()[dim] - box.lo()[dim];
      if (extent == 1) continue;
      buffer_stride /= extent;
      const index_t view_stride = strides[dim] * size_;
      if (!dims.empty() && dims.back().view_stride == extent * view_stride) {
        dims.back() = {dims.back().extent * extent, view_stride, buffer_stride};
      } else {
        dims.push_back({extent, view_stride, buffer_stride});
      }
    }
    if (dims.empty()) dims.push_back({1, size_, size_});
    return dims;
  }

  // Makes a short contiguous innermost dim part of a unit, which leaves the run to a longer dim.
  //
  // Copies fuse its elements (a W face two elements wide) to words of up to 16 bytes, if all their
  // addresses are aligned to that. With options.pieces, the whole dim becomes a unit of the widest
  // words that all addresses allow, if these are too few for a row of their own.
  void join(const void* view, const RunOptions& options, std::vector<Dim>& dims,
            RunBox& box) const {
    Dim& inner = dims.back();
    if (inner.view_stride != size_) return;
    const index_t piece = inner.extent * size_;
    // All addresses are sums of these numbers, so they are aligned if all of these are.
    auto all = reinterpret_cast<std::uintptr_t>(view) |
               reinterpret_cast<std::uintptr_t>(options.buffer) |
               static_cast<std::uintptr_t>(box.view_offset | box.buffer_offset | piece);
    for (std::size_t i = 0; i + 1 < dims.size(); ++i) {
      all |= static_cast<std::uintptr_t>(dims[i].view_stride | dims[i].buffer_stride);
    }
    const auto fits = [&](index_t bytes) { return all % static_cast<std::uintptr_t>(bytes) == 0; };
    index_t word = size_;
    if (options.fuse) {
      while (word < 16 && fits(2 * word)) word *= 2;
    } else if (options.pieces && size_ > 1 && fits(16)) {
      word = 16;  // a vector of elements; of single bytes, it would need too many registers
    }
    if (options.pieces) {
      const bool is_short = 2 * piece <= options.segment_bytes && piece <= kShortPiece * word;
      if (dims.size() == 1 || !is_short) return;
      box.word = static_cast<std::int16_t>(word);
      box.words = Divisor::by(piece / word);
      dims.pop_back();
      return;
    }
    if (!options.fuse || piece >= kLongRunBytes) return;
    box.word = static_cast<std::int16_t>(word);
    inner = {piece / word, word, word};
    if (inner.extent == 1 && dims.size() > 1) dims.pop_back();
  }

  // Runs go along the innermost dim if it is long enough to pay for the arithmetic of a row, else
  // along the longest. Strided runs are kept short: the neighbors of an element in its cache line
  // belong to other runs, which come next, while the line is still in the cache.
  void take_run_dim(index_t segment_bytes, std::vector<Dim>& dims, RunBox& box) const {
    const index_t unit = box.unit();
    auto run = dims.end() - 1;
    const index_t enough = run->view_stride == unit
                               ? kLongRunBytes / unit
                               : std::clamp<index_t>(segment_bytes / unit, 1, kLongRunUnits);
    if (run->extent < enough) {
      const auto longest = std::ranges::max_element(dims, {}, &Dim::extent);
      if (longest->extent > run->extent) run = longest;
    }
    box.extent = run->extent;
    box.view_stride = run->view_stride;
    box.buffer_stride = run->buffer_stride;
    const index_t most = std::max<index_t>(segment_bytes / unit, 1);
    if (run->view_stride == unit && run->buffer_stride == unit) {
      box.segment = most;  // a whole number of 16-byte words: segments have one alignment
    } else if (box.words.divisor > 1) {
      box.segment = ceil_div(run->extent, ceil_div(run->extent, most));  // of equal length
    } else {
      box.segment = kStridedSegment;
    }
    dims.erase(run);
  }

  static constexpr index_t kLongRunBytes = 64;     // contiguous
  static constexpr index_t kLongRunUnits = 32;     // strided
  static constexpr index_t kStridedSegment = 256;  // units
  static constexpr index_t kShortPiece = 128;      // words: four per lane

  index_t size_;
  std::vector<RunBox> boxes_;
  index_t rows_ = 0;
  index_t bytes_ = 0;
};

}  // namespace pydist::ops
