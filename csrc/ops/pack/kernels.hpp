// pack, unpack and unpack_add: boxes of a view to and from a buffer. Views and buffers must have
// passed the border's checks: same dtype and device, boxes within the view, a contiguous buffer of
// one dim with at least regions.elements() elements.
#pragma once

#include <cstdint>
#include <vector>

#include "core/view.hpp"
#include "launch/device.hpp"
#include "ops/pack/regions.hpp"
#include "ops/pack/runs.hpp"

namespace pydist::cpu {

enum class PackOp {
  kPack,       // buffer <- the boxes of the view
  kUnpack,     // the boxes of the view <- buffer; where boxes overlap, the last one stays
  kUnpackAdd,  // the boxes of the view += buffer, box after box where they overlap
};

// A transfer between boxes of a view and a buffer, planned once for all pairs that differ only in
// their addresses: planning takes as long as moving some 20 KB. Immutable, so threads may share it.
class PreparedTransfer {
 public:
  PreparedTransfer(PackOp op, const TensorView& view, const ops::Regions& regions,
                   const TensorView& buffer);

  // Whether the plan fits a view and buffer: dtype, shape, strides and alignment.
  bool fits(const TensorView& view, const TensorView& buffer) const;

  // Bytes of memory that are read and written.
  index_t traffic() const { return traffic_; }

  // Does the transfer on the pool's threads, and returns when it is done. The plan must fit.
  void run(const TensorView& view, const TensorView& buffer) const;

 private:
  PackOp op_;
  DType dtype_;
  Coords shape_, strides_;
  std::uintptr_t alignment_;
  std::vector<ops::RunTable> groups_;
  index_t traffic_ = 0;
};

// The same, planned for a single use.
inline void pack(const TensorView& src, const ops::Regions& regions, const TensorView& buffer) {
  PreparedTransfer(PackOp::kPack, src, regions, buffer).run(src, buffer);
}
inline void unpack(const TensorView& buffer, const ops::Regions& regions, const TensorView& dst) {
  PreparedTransfer(PackOp::kUnpack, dst, regions, buffer).run(dst, buffer);
}
inline void unpack_add(const TensorView& buffer, const ops::Regions& regions,
                       const TensorView& dst) {
  PreparedTransfer(PackOp::kUnpackAdd, dst, regions, buffer).run(dst, buffer);
}

}  // namespace pydist::cpu

namespace pydist::cuda {

// Launched per group of disjoint boxes, in the boxes' order; up to 128 boxes fit into the
// parameters of one launch. Planned in each call, while the device does earlier work.
void pack(const TensorView& src, const ops::Regions& regions, const TensorView& buffer,
          const Queue& queue);
void unpack(const TensorView& buffer, const ops::Regions& regions, const TensorView& dst,
            const Queue& queue);
void unpack_add(const TensorView& buffer, const ops::Regions& regions, const TensorView& dst,
                const Queue& queue);

}  // namespace pydist::cuda
