// pack, unpack and unpack_add on the CPU.
//
// unpack_add and long copies run the shared bodies (body.hpp). Short rows on one thread do not:
// finding a row by CopyRuns can take as long as copying it, so copy_rows walks them by strides.
// Measured on a float array 16 x 64 x 128 x 128, one thread: CopyRuns takes 1.9 times as long for
// rows of 64 bytes (a W face of 16), and as long (0.8 to 1.2) for D and H faces.
// Proof: tests/native/test_pack.cpp, tests/kernels/test_pack.py.
#include "launch/cpu.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "launch/thread_pool.hpp"
#include "ops/common/dispatch.hpp"
#include "ops/pack/body.hpp"
#include "ops/pack/kernels.hpp"

namespace pydist::cpu {
namespace {

using ops::Direction;
using ops::HostTable;
using ops::Regions;
using ops::RunBox;
using ops::RunOptions;
using ops::RunTable;

// Both addresses modulo 16: a plan depends on nothing else of them.
std::uintptr_t alignment_of(const TensorView& view, const TensorView& buffer) {
  return (reinterpret_cast<std::uintptr_t>(view.data) |
          reinterpret_cast<std::uintptr_t>(buffer.data)) %
         sizeof(ops::Word<16>);
}

HostTable host_table(const RunTable& runs) {
  return {runs.boxes().data(), static_cast<int>(runs.boxes().size()), runs.rows()};
}

// Whether copy_rows may be used: one thread does all, and every row is one contiguous piece.
bool follows_by_strides(const RunTable& runs) {
  if (launch::num_threads() > 1 && runs.bytes() >= launch::kBytesPerThread) return false;
  return std::ranges::all_of(runs.boxes(), [](const RunBox& box) {
    return box.view_stride == box.unit() && box.buffer_stride == box.unit() &&
           box.extent <= box.segment;
  });
}

// Rows that are `view_stride` and `buffer_stride` bytes apart.
template <Direction kDirection>
void copy_line(char* view, index_t view_stride, char* buffer, index_t buffer_stride, index_t rows,
               std::size_t bytes) {
  for (index_t row = 0; row < rows; ++row) {
    if constexpr (kDirection == Direction::kPack) {
      std::memcpy(buffer, view, bytes);
    } else {
      std::memcpy(view, buffer, bytes);
    }
    view += view_stride;
    buffer += buffer_stride;
  }
}

// The rows of a box: the innermost outer dim by strides (a line), the others by division, once per
// line.
template <Direction kDirection>
void copy_rows(const TensorView& view, const RunBox& box, const TensorView& buffer) {
  const auto bytes = static_cast<std::size_t>(box.extent * box.unit());
  const int inner = box.outer_dims - 1;
  const index_t rows = inner < 0 ? 1 : box.outer_extent[inner];
  const index_t view_stride = inner < 0 ? 0 : box.outer_view_stride[inner];
  const index_t buffer_stride = inner < 0 ? 0 : box.outer_buffer_stride[inner];
  for (index_t line = 0; line < box.outer_rows / rows; ++line) {
    index_t rest = line, in_view = box.view_offset, in_buffer = box.buffer_offset;
    for (int dim = inner - 1; dim >= 0; --dim) {
      const index_t above = rest / box.outer_extent[dim];
      const index_t index = rest - above * box.outer_extent[dim];
      in_view += index * box.outer_view_stride[dim];
      in_buffer += index * box.outer_buffer_stride[dim];
      rest = above;
    }
    copy_line<kDirection>(static_cast<char*>(view.data) + in_view, view_stride,
                          static_cast<char*>(buffer.data) + in_buffer, buffer_stride, rows, bytes);
  }
}

template <Direction kDirection>
void copy(const TensorView& view, const RunTable& runs, const TensorView& buffer) {
  if (follows_by_strides(runs)) {
    for (const RunBox& box : runs.boxes()) copy_rows<kDirection>(view, box, buffer);
    return;
  }
  const ops::CopyRuns<kDirection, HostTable> body{
      static_cast<char*>(view.data), static_cast<char*>(buffer.data), host_table(runs)};
  launch::run_on_cpu(body, 2 * runs.bytes());
}

void add(const TensorView& view, const RunTable& runs, const TensorView& buffer) {
  ops::dispatch(view.dtype, [&]<class T>(std::type_identity<T>) {
    const ops::AddRuns<T, HostTable> body{static_cast<char*>(view.data),
                                          static_cast<const char*>(buffer.data), host_table(runs)};
    launch::run_on_cpu(body, 3 * runs.bytes());
  });
}

}  // namespace

PreparedTransfer::PreparedTransfer(PackOp op, const TensorView& view, const Regions& regions,
                                   const TensorView& buffer)
    : op_(op),
      dtype_(view.dtype),
      shape_(view.shape),
      strides_(view.strides),
      alignment_(alignment_of(view, buffer)) {
  const RunOptions options{.segment_bytes = ops::kCpuSegmentBytes,
                           .fuse = op != PackOp::kUnpackAdd,
                           .buffer = buffer.data};
  const auto prepare = [&](Regions::Group group) {
    groups_.emplace_back(view, regions, group, options);
    traffic_ += (op == PackOp::kUnpackAdd ? 3 : 2) * groups_.back().bytes();
  };
  if (op == PackOp::kPack) {
    prepare({0, regions.parts().size()});  // reads may overlap
  } else {
    for (const Regions::Group group : regions.disjoint_groups()) prepare(group);
  }
}

bool PreparedTransfer::fits(const TensorView& view, const TensorView& buffer) const {
  return view.dtype == dtype_ && view.shape == shape_ && view.strides == strides_ &&
         alignment_of(view, buffer) == alignment_;
}

void PreparedTransfer::run(const TensorView& view, const TensorView& buffer) const {
  for (const RunTable& runs : groups_) {
    switch (op_) {
      case PackOp::kPack:
        copy<Direction::kPack>(view, runs, buffer);
        break;
      case PackOp::kUnpack:
        copy<Direction::kUnpack>(view, runs, buffer);
        break;
      case PackOp::kUnpackAdd:
        add(view, runs, buffer);
        break;
    }
  }
}

}  // namespace pydist::cpu
