// Every kernel on a CUDA device against the same kernel on the CPU: small, and without libraries
// except the CUDA runtime, so that compute-sanitizer takes only seconds (tools/gpu_check.sh). With
// PYDIST_CUDA=EMULATED, all kernels run on the host.
#include <cuda_runtime.h>

#include <cstdio>
#include <vector>

#include "device_case.hpp"
#include "on_device.hpp"
#include "ops/input/kernels.hpp"
#include "ops/pack/kernels.hpp"
#include "ops/random/kernels.hpp"

namespace pydist {
namespace {

using namespace testing;

constexpr int kSkipped = 77;

// Boxes that overlap and an empty one, more than a small table holds, and disjoint lines, more than
// the maximum of one launch.
std::vector<std::vector<Box>> box_lists(Random& random, const Coords& shape) {
  const auto part_of = [&](Coords lo, Coords hi, int first_dim) {
    for (int dim = first_dim; dim < shape.ndim(); ++dim) {
      lo[dim] = random.between(0, shape[dim] - 1);
      hi[dim] = random.between(lo[dim] + 1, shape[dim]);
    }
    return Box(lo, hi);
  };
  std::vector<std::vector<Box>> lists;
  for (const int count : {3, 20}) {
    std::vector<Box> boxes{Box(Coords(5), Coords(5))};
    for (int i = 0; i < count; ++i) boxes.push_back(part_of(Coords(5), Coords(5), 0));
    lists.push_back(boxes);
  }
  Coords lines = shape;
  lines[4] = 1;
  lists.emplace_back();
  for_each_index(Box(Coords(5), lines), [&](const Coords& at) {
    Coords end = at;
    for (int dim = 0; dim < 4; ++dim) ++end[dim];
    lists.back().push_back(part_of(at, end, 4));
  });
  return lists;
}

void packing(Random& random) {
  const Coords shape{2, 3, 7, 9, 35};
  for (const DType dtype :
       {DType::kUInt8, DType::kInt16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    const double tolerance = dtype == DType::kBFloat16 ? 0x1p-7 : 0;
    for (const std::vector<Box>& boxes : box_lists(random, shape)) {
      Array view(random, dtype, shape);
      const ops::Regions regions(boxes);
      const Coords row{regions.elements() + 1};  // an allocation must not be empty
      Array buffer(random, dtype, row, Coords{1});
      cpu::unpack(buffer.host(), regions, view.host());  // the last of several boxes remains
      cuda::unpack(buffer.device(), regions, view.device(), queue);
      expect("unpack", view, 0);
      cpu::unpack_add(buffer.host(), regions, view.host());
      cuda::unpack_add(buffer.device(), regions, view.device(), queue);
      expect("unpack_add", view, tolerance);
      cpu::pack(view.host(), regions, buffer.host());
      cuda::pack(view.device(), regions, buffer.device(), queue);
      expect("pack", buffer, tolerance);
    }
  }
}

void numbers(Random& random) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    Array out(random, dtype, {3, 5, 70});
    Array key(random, DType::kInt64, {1});
    const Coords lo{1, 2, 3}, shape{9, 9, 99};
    cpu::keyed_uniform(out.host(), {.value = 7}, lo, shape);
    cuda::keyed_uniform(out.device(), {.value = 7}, lo, shape, queue);
    expect("keyed_uniform", out, 0);
    const auto at = [](const TensorView& view) {
      return ops::UniformKey{.at = static_cast<const std::uint64_t*>(view.data)};
    };
    cpu::keyed_uniform(out.host(), at(key.host()), lo, shape);
    cuda::keyed_uniform(out.device(), at(key.device()), lo, shape, queue);
    expect("keyed_uniform by a key in memory", out, 0);
  }
}

void conversion(Random& random) {
  const Coords shape{2, 5, 7, 67}, one{1};
  for (const DType to : {DType::kFloat32, DType::kFloat64}) {
    Array found(random, DType::kInt32, one);
    for (const DType from : {DType::kUInt8, DType::kInt16}) {
      const index_t entries = index_t{1} << (8 * size_of(from));
      Array stored(random, from, shape), out(random, to, shape);
      Array table(random, to, {2, entries}, {entries, 1});
      cpu::look_up(stored.host(), table.host(), 3, out.host(), found.host());
      cuda::look_up(stored.device(), table.device(), 3, out.device(), found.device(), queue);
      expect("look_up", out, 0);
    }
    for (const DType from : {DType::kInt32, DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
      Array stored(random, from, shape), out(random, to, shape);
      Array maps(random, DType::kFloat64, {2, 4}, {4, 1});
      for (const bool log : {false, true}) {
        cpu::rescale(stored.host(), maps.host(), log, 3, out.host(), found.host());
        cuda::rescale(stored.device(), maps.device(), log, 3, out.device(), found.device(), queue);
        if (!log) expect("rescale", out, to == DType::kFloat32 ? 0x1p-22 : 1e-15);
      }
      expect("rescale's finding", found, 0);
    }
  }
}

}  // namespace
}  // namespace pydist

int main() {
  using namespace pydist;
  using namespace pydist::testing;
  if (cuda::device_count() == 0) {
    std::puts("skipped: no CUDA device");
    return kSkipped;
  }
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  queue = {0, stream};
  Random random(1);
  for (const auto test :
       {packing, convolution, tensor_cores, pooling, norms, numbers, conversion, empties}) {
    test(random);
  }
  check(cudaStreamDestroy(stream));
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
