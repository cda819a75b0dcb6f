#include "cpu/pack.hpp"

#include "kernels/dispatch.hpp"
#include "kernels/pack.hpp"
#include "launch/cpu.hpp"

namespace pydist::cpu {
namespace {

using kernels::Direction;
using kernels::HostTable;
using kernels::Regions;
using kernels::RunOptions;
using kernels::RunTable;

// Addresses count as far as wide words need them aligned.
std::uintptr_t alignment_of(const TensorView& view, const TensorView& buffer) {
  return (reinterpret_cast<std::uintptr_t>(view.data) |
          reinterpret_cast<std::uintptr_t>(buffer.data)) %
         sizeof(kernels::Word<16>);
}

HostTable host_table(const RunTable& runs) {
  return {runs.boxes().data(), static_cast<int>(runs.boxes().size()), runs.rows()};
}

template <Direction kDirection>
void copy(const TensorView& view, const RunTable& runs, const TensorView& buffer) {
  const kernels::CopyRuns<kDirection, HostTable> body{
      static_cast<char*>(view.data), static_cast<char*>(buffer.data), host_table(runs)};
  launch::run_on_cpu(body, 2 * runs.bytes());
}

void add(const TensorView& view, const RunTable& runs, const TensorView& buffer) {
  kernels::dispatch(view.dtype, [&]<class T>(std::type_identity<T>) {
    const kernels::AddRuns<T, HostTable> body{
        static_cast<char*>(view.data), static_cast<const char*>(buffer.data), host_table(runs)};
    launch::run_on_cpu(body, 3 * runs.bytes());
  });
}

}  // namespace

PreparedTransfer::PreparedTransfer(Transfer transfer, const TensorView& view,
                                   const Regions& regions, const TensorView& buffer)
    : transfer_(transfer),
      dtype_(view.dtype),
      shape_(view.shape),
      strides_(view.strides),
      alignment_(alignment_of(view, buffer)) {
  const RunOptions options{.segment_bytes = kernels::kCpuSegmentBytes,
                           .fuse = transfer != Transfer::kUnpackAdd,
                           .buffer = buffer.data};
  const auto prepare = [&](Regions::Group group) {
    groups_.emplace_back(view, regions, group, options);
    traffic_ += (transfer == Transfer::kUnpackAdd ? 3 : 2) * groups_.back().bytes();
  };
  if (transfer == Transfer::kPack) {
    prepare({0, regions.parts().size()});  // what is read may overlap
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
    switch (transfer_) {
      case Transfer::kPack:
        copy<Direction::kPack>(view, runs, buffer);
        break;
      case Transfer::kUnpack:
        copy<Direction::kUnpack>(view, runs, buffer);
        break;
      case Transfer::kUnpackAdd:
        add(view, runs, buffer);
        break;
    }
  }
}

}  // namespace pydist::cpu
