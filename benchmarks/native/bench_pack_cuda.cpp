// Packing, unpacking and adding the faces of a 16 x 192^3 tensor on a CUDA device, in channels-last
// and in C order, compared with a copy of the same size. bytes_per_second counts bytes read and
// written. The planes are visited in turn, so that they come from memory and not from the cache.
#include <string>
#include <vector>

#include "on_device.hpp"
#include "ops/pack/kernels.hpp"

namespace pydist::bench {
namespace {

using ops::Regions;

constexpr index_t kChannels = 16, kEdge = 192;
constexpr index_t kPlanes = 32;  // visited, as far apart as possible
constexpr int kRounds = 10;      // over the planes; a fixed number, as fixtures are large

const char* const kFaces[] = {"depth", "height", "width"};

// A tensor of ascending integers on the device, and a buffer per plane across one of its dims.
class Fixture {
 public:
  // face: across depth (0), height (1) or width (2).
  Fixture(int face, bool channels_last)
      : values_(static_cast<std::size_t>(kChannels * kEdge * kEdge * kEdge)),
        tensor_(values_.size() * sizeof(float)),
        buffers_(static_cast<std::size_t>(kPlanes) * face_bytes()) {
    // 24 bits: integers that float represents exactly
    for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = static_cast<float>(i % (1 << 23));
    check(cudaMemcpy(tensor_.data(), values_.data(), values_.size() * sizeof(float),
                     cudaMemcpyHostToDevice));
    // Dims in the order of memory: messages of a channels-last tensor have its order too.
    const Coords shape = channels_last ? Coords{1, kEdge, kEdge, kEdge, kChannels}
                                       : Coords{1, kChannels, kEdge, kEdge, kEdge};
    const int dim = face + (channels_last ? 1 : 2);
    Coords strides(5);
    index_t stride = 1;
    for (int each = 4; each >= 0; --each) {
      strides[each] = stride;
      stride *= shape[each];
    }
    view_ = {tensor_.data(), DType::kFloat32, shape, strides, {DeviceType::kCuda, 0}};
    for (index_t i = 0; i < kPlanes; ++i) {
      Coords lo(5), hi = shape;
      lo[dim] = i * (kEdge / kPlanes);
      hi[dim] = lo[dim] + 1;
      boxes_.emplace_back(lo, hi);
      regions_.push_back(Regions({boxes_.back()}));
    }
  }

  static std::size_t face_bytes() {
    return static_cast<std::size_t>(kChannels * kEdge * kEdge) * sizeof(float);
  }
  void pack() { cuda::pack(view_, regions_[at_], buffer(), queue_), advance(); }
  void unpack() { cuda::unpack(buffer(), regions_[at_], view_, queue_), advance(); }
  void unpack_add() { cuda::unpack_add(buffer(), regions_[at_], view_, queue_), advance(); }

  // Whether plane 0, packed, is `factor` times the tensor's first values there.
  bool packed(float factor) {
    at_ = 0;
    pack();
    std::vector<float> found(face_bytes() / sizeof(float));
    check(cudaMemcpy(found.data(), buffers_.data(), face_bytes(), cudaMemcpyDeviceToHost));
    std::size_t at = 0;
    const Box& box = boxes_.front();
    Coords i = box.lo();
    for (i[1] = box.lo()[1]; i[1] < box.hi()[1]; ++i[1])
      for (i[2] = box.lo()[2]; i[2] < box.hi()[2]; ++i[2])
        for (i[3] = box.lo()[3]; i[3] < box.hi()[3]; ++i[3])
          for (i[4] = box.lo()[4]; i[4] < box.hi()[4]; ++i[4]) {
            index_t offset = 0;
            for (int each = 0; each < 5; ++each) offset += i[each] * view_.strides[each];
            if (found[at++] != factor * values_[static_cast<std::size_t>(offset)]) return false;
          }
    at_ = 0;
    return true;
  }
  // Runs a kernel on plane 0, whose buffer `packed` has filled.
  void once(void (Fixture::*kernel)()) {
    at_ = 0;
    (this->*kernel)();
    at_ = 0;
  }

 private:
  // Of the plane whose turn it is.
  TensorView buffer() const {
    auto* const data = static_cast<char*>(buffers_.data()) + at_ * face_bytes();
    return {data, DType::kFloat32, {kChannels * kEdge * kEdge}, {1}, {DeviceType::kCuda, 0}};
  }
  void advance() { at_ = (at_ + 1) % static_cast<std::size_t>(kPlanes); }

  std::vector<float> values_;
  Memory tensor_, buffers_;
  TensorView view_;
  std::vector<Box> boxes_;
  std::vector<Regions> regions_;
  std::size_t at_ = 0;
  cuda::Queue queue_{0, nullptr};
};

void bench_pack(benchmark::State& state, int face, bool channels_last, int arrays,
                void (Fixture::*kernel)()) {
  Fixture fixture(face, channels_last);
  bool right = fixture.packed(1);
  fixture.once(kernel);
  right = right && fixture.packed(kernel == &Fixture::unpack_add ? 2 : 1);
  if (!right) return state.SkipWithError("the result is wrong");
  run_on_device(state, [&] { (fixture.*kernel)(); });
  state.SetBytesProcessed(state.iterations() *
                          static_cast<std::int64_t>(arrays * Fixture::face_bytes()));
}

void bench_copy(benchmark::State& state) {
  const std::size_t bytes = Fixture::face_bytes();
  const Memory from(kPlanes * bytes), to(kPlanes * bytes);
  check(cudaMemset(from.data(), 1, kPlanes * bytes));
  std::size_t at = 0;
  run_on_device(state, [&] {
    check(cudaMemcpyAsync(static_cast<char*>(to.data()) + at * bytes,
                          static_cast<char*>(from.data()) + at * bytes, bytes,
                          cudaMemcpyDeviceToDevice, nullptr));
    at = (at + 1) % kPlanes;
  });
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(2 * bytes));
}

}  // namespace

void register_pack() {
  benchmark::RegisterBenchmark("copy", bench_copy)->UseManualTime()->Iterations(kRounds * kPlanes);
  for (int face = 0; face < 3; ++face) {
    for (const bool channels_last : {false, true}) {
      const std::string name =
          std::string("/") + kFaces[face] + (channels_last ? "/channels_last" : "");
      const auto add = [&](const char* kernel, int arrays, void (Fixture::*call)()) {
        benchmark::RegisterBenchmark((kernel + name).c_str(), bench_pack, face, channels_last,
                                     arrays, call)
            ->UseManualTime()
            ->Iterations(kRounds * kPlanes);
      };
      add("pack", 2, &Fixture::pack);
      add("unpack", 2, &Fixture::unpack);
      add("unpack_add", 3, &Fixture::unpack_add);
    }
  }
}

}  // namespace pydist::bench
