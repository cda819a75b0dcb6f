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

HostTable host_table(const RunTable& runs) {
  return {runs.boxes().data(), static_cast<int>(runs.boxes().size()), runs.rows()};
}

template <Direction kDirection>
void copy(const TensorView& view, const Regions& regions, Regions::Group group,
          const TensorView& buffer) {
  const RunTable runs(
      view, buffer, regions, group,
      RunOptions{.segment_bytes = kernels::kCpuSegmentBytes, .fuse = true, .buffer = buffer.data});
  const kernels::CopyRuns<kDirection, HostTable> body{
      static_cast<char*>(view.data), static_cast<char*>(buffer.data), host_table(runs)};
  launch::run_on_cpu(body, 2 * runs.bytes());
}

}  // namespace

void pack(const TensorView& src, const Regions& regions, const TensorView& buffer) {
  copy<Direction::kPack>(src, regions, {0, regions.parts().size()}, buffer);
}

void unpack(const TensorView& buffer, const Regions& regions, const TensorView& dst) {
  for (const Regions::Group group : regions.disjoint_groups()) {
    copy<Direction::kUnpack>(dst, regions, group, buffer);
  }
}

void unpack_add(const TensorView& buffer, const Regions& regions, const TensorView& dst) {
  const RunOptions options{.segment_bytes = kernels::kCpuSegmentBytes, .fuse = false};
  for (const Regions::Group group : regions.disjoint_groups()) {
    const RunTable runs(dst, buffer, regions, group, options);
    kernels::dispatch(dst.dtype, [&]<class T>(std::type_identity<T>) {
      const kernels::AddRuns<T, HostTable> body{
          static_cast<char*>(dst.data), static_cast<const char*>(buffer.data), host_table(runs)};
      launch::run_on_cpu(body, 3 * runs.bytes());
    });
  }
}

}  // namespace pydist::cpu
