// pack, unpack and unpack_add on CUDA devices: run tables as kernel parameters, and the launches.
//
// The host cuts a table into pieces that fit into a kernel's parameters; each is one launch.
// Nothing is allocated on the device and the host does not wait, so a captured graph can hold these
// launches.
//
// Threads: a warp or less per run (body.hpp); the rows of a table are its boxes' runs, one after
// the
//   other, and each word of a run has one lane. Boxes of a launch are disjoint (disjoint_groups for
//   unpack and unpack_add), so no element is written by two lanes.
// Traffic: 2 bytes per byte copied, 3 per byte added.
// Proof: tests/native/test_pack.cpp emulates it, tests/gpu/test_kernels_gpu.py compares a device
// with
//   the CPU.
#include <utility>

#include "launch/cuda.cuh"
#include "launch/runtime.cuh"
#include "ops/common/dispatch.hpp"
#include "ops/pack/body.hpp"
#include "ops/pack/kernels.hpp"

namespace pydist::cuda {
namespace {

using ops::Direction;
using ops::Regions;
using ops::RunBox;
using ops::RunOptions;
using ops::RunTable;
using ops::ValueTable;

// Boxes of a launch. Up to 4 KB of parameters cost nothing, up to 32 KB are possible: a RunBox has
// 248 bytes.
constexpr int kFewBoxes = 16;
constexpr int kManyBoxes = 128;

// The boxes as a kernel parameter of fixed size; entries from `count` on are unused.
template <int N>
ValueTable<N> value_table(const std::vector<RunBox>& boxes, index_t rows) {
  ValueTable<N> table{};
  table.count = static_cast<int>(boxes.size());
  table.rows = rows;
  for (std::size_t i = 0; i < boxes.size(); ++i) table.data[i] = boxes[i];
  return table;
}

// Calls launch(table, words of an average run) once for each kManyBoxes boxes.
template <class Launch>
void launch_tables(const RunTable& runs, const Launch& launch) {
  const std::vector<RunBox>& boxes = runs.boxes();
  for (std::size_t first = 0; first < boxes.size(); first += kManyBoxes) {
    const std::size_t end = std::min(first + kManyBoxes, boxes.size());
    std::vector<RunBox> part(boxes.begin() + static_cast<std::ptrdiff_t>(first),
                             boxes.begin() + static_cast<std::ptrdiff_t>(end));
    const index_t first_row = part.front().first_row;
    const index_t rows = (end < boxes.size() ? boxes[end].first_row : runs.rows()) - first_row;
    for (RunBox& box : part) box.first_row -= first_row;
    const index_t words = ceil_div(runs.bytes(), std::max<index_t>(runs.rows(), 1) * 16);
    if (part.size() <= kFewBoxes) {
      launch(value_table<kFewBoxes>(part, rows), words);
    } else {
      launch(value_table<kManyBoxes>(part, rows), words);
    }
  }
}

// Segments are short enough to spread a small message over the device. `fuse`: several adjacent
// elements may move as one word, as in plain copies.
RunOptions options_of(const TensorView& view, const Regions& regions, const TensorView& buffer,
                      bool fuse) {
  return {.segment_bytes = ops::cuda_segment(regions.elements() * size_of(view.dtype)),
          .fuse = fuse,
          .pieces = true,
          .buffer = buffer.data};
}

// One group of disjoint boxes, in either direction.
template <Direction kDirection>
void copy(const TensorView& view, const Regions& regions, Regions::Group group,
          const TensorView& buffer, const Queue& queue) {
  const RunTable runs(view, regions, group, options_of(view, regions, buffer, true));
  if (runs.contiguous()) {  // the driver's copy is some 10 % faster
    const RunBox& box = runs.boxes().front();
    void* to = static_cast<char*>(view.data) + box.view_offset;
    void* from = static_cast<char*>(buffer.data) + box.buffer_offset;
    if (kDirection == Direction::kPack) std::swap(to, from);
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(runs.bytes()),
                          cudaMemcpyDeviceToDevice, stream_of(queue)),
          "copy of pack");
    return;
  }
  launch_tables(runs, [&]<class Table>(const Table& table, index_t words) {
    const ops::CopyRuns<kDirection, Table> body{static_cast<char*>(view.data),
                                                static_cast<char*>(buffer.data), table};
    check(launch::run_on_cuda(body, words, stream_of(queue)), "launch of pack");
  });
}

}  // namespace

void pack(const TensorView& src, const Regions& regions, const TensorView& buffer,
          const Queue& queue) {
  const DeviceGuard guard(queue.device);
  copy<Direction::kPack>(src, regions, {0, regions.parts().size()}, buffer, queue);
}

void unpack(const TensorView& buffer, const Regions& regions, const TensorView& dst,
            const Queue& queue) {
  const DeviceGuard guard(queue.device);
  for (const Regions::Group group : regions.disjoint_groups()) {
    copy<Direction::kUnpack>(dst, regions, group, buffer, queue);
  }
}

void unpack_add(const TensorView& buffer, const Regions& regions, const TensorView& dst,
                const Queue& queue) {
  const DeviceGuard guard(queue.device);
  const RunOptions options = options_of(dst, regions, buffer, false);
  for (const Regions::Group group : regions.disjoint_groups()) {
    const RunTable runs(dst, regions, group, options);
    ops::dispatch(dst.dtype, [&]<class T>(std::type_identity<T>) {
      launch_tables(runs, [&]<class Table>(const Table& table, index_t words) {
        const ops::AddRuns<T, Table> body{static_cast<char*>(dst.data),
                                          static_cast<const char*>(buffer.data), table};
        check(launch::run_on_cuda(body, words, stream_of(queue)), "launch of unpack_add");
      });
    });
  }
}

}  // namespace pydist::cuda
