// Lowers a boundary convolution to dense matrix tiles over padded planes.
//
// A slab is thin in one dim and wide in the other two. The wide dims become a plane: the source
// array is copied, padded with zeros, into a workspace in which one step in any kernel direction is
// a constant offset. Rows of the plane follow each other with a fixed pitch, so a full plane is
// one long row of positions q; positions in the padding of a row are computed and discarded. The
// thin dim is walked explicitly.
//
//   source plane (padded)          workspace: one row of q, pitch 6          kernel 3 x 3
//     0 0 0 0 0 0
//     0 a b c d 0                  0 0 0 0 0 0 0 a b c d 0 0 e f g h 0 ...    offset(ky, kx) =
//     0 e f g h 0                  ^q = 0                                     ky * pitch + kx
//     0 0 0 0 0 0
//
// Forward and dgrad are both
//   destination[m, q] += sum_taps weight[m, tap] * source[offset(tap) + q]
//   forward: the source is cut into stride x stride phases, so that taps stay contiguous;
//   dgrad: the destination is cut into classes of equal index modulo stride, with few taps each.
// wgrad takes forward's layout: the same offsets, summed over q instead of taps.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "ops/conv/problem.hpp"

namespace pydist::cpu {

// One kernel index along one plane dim, for one class of destinations.
struct LineTap {
  index_t kernel;
  index_t phase;   // of the source, which it reads
  index_t offset;  // added to the destination's number within its class
};

// Destinations first, first + step, ... that the source reaches and that share their taps.
struct LineClass {
  index_t first, step, count;
  std::vector<LineTap> taps;
};

// One plane dim. Position x of phase p holds the source index phase_first[p] + x * source_step, or
// zero if that does not exist.
struct Line {
  std::vector<LineClass> classes;
  std::vector<index_t> phase_first;
  index_t source_step = 1;
  index_t extent = 0;
};

// The thin dim: one destination index and the (kernel, source) pairs that it is summed from.
struct ThinLink {
  index_t destination;
  std::vector<std::pair<index_t, index_t>> pairs;
};

// One plane of destinations; taps are parallel arrays of offsets in elements.
struct PlaneJob {
  index_t destination;         // offset of its first element in the destination array
  index_t row_stride, stride;  // between its rows and within one, in the destination array
  index_t rows, columns;
  std::vector<index_t> source_offset;  // in the workspace, within a channel
  std::vector<index_t> weight_offset;  // within the kernel of one channel pair

  index_t positions(index_t pitch) const { return (rows - 1) * pitch + columns; }
};

enum class ConvRole { kForward, kDgrad };

// The layout of a problem in the workspace, and its jobs. Depends only on extents, not on data.
struct ConvLowering {
  int thin, row, column;  // spatial dims in these roles
  Line rows, columns;
  std::vector<ThinLink> links;
  std::vector<PlaneJob> jobs;
  index_t thin_extent;  // of the source
  index_t pitch;        // from one row of a plane to the next
  index_t plane;        // elements of one phase plane
  index_t channel;      // elements of one channel: thin_extent * phases * plane

  bool empty() const { return jobs.empty(); }
};

// The source is `in` for forward (and wgrad), `out` for dgrad; the destination is the other one.
ConvLowering lower(const ops::ConvProblem& problem, ConvRole role);

// Copies channel `channel` of sample `sample` of the source into `workspace` (its `channel`
// elements), padded with zeros; fp16 and bf16 become float.
template <class T, class Source>
void fill_channel(const ConvLowering& lowering, const ops::ConvProblem& problem, ConvRole role,
                  const Source* channel, T* workspace);

}  // namespace pydist::cpu
