// Packing the faces of a 16 x 128^3 float tensor, compared with memcpy of the same size.
#include <benchmark/benchmark.h>

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "ops/pack/kernels.hpp"

namespace pydist {
namespace {

struct Face {
  const char* name;
  Box box;
};

const Face kFaces[] = {
    {"depth", Box({0, 0, 0, 0, 0}, {1, 16, 1, 128, 128})},
    {"height", Box({0, 0, 0, 0, 0}, {1, 16, 128, 1, 128})},
    {"width", Box({0, 0, 0, 0, 127}, {1, 16, 128, 128, 128})},
    {"width2", Box({0, 0, 0, 0, 126}, {1, 16, 128, 128, 128})},
};

// A tensor of ascending integers, in C order or with channels last, and a buffer for one face.
class Fixture {
 public:
  Fixture(const Face& face, bool channels_last)
      : regions_({face.box}),
        memory_(std::size_t{16} << 21),
        buffer_(static_cast<std::size_t>(regions_.elements())) {
    std::iota(memory_.begin(), memory_.end(), 0.0f);
    const Coords strides = channels_last ? Coords{16 << 21, 1, 16 << 14, 16 << 7, 16}
                                         : Coords{16 << 21, 1 << 21, 1 << 14, 128, 1};
    view_ = {memory_.data(), DType::kFloat32, {1, 16, 128, 128, 128}, strides, {}};
    buffer_view_ = {buffer_.data(), DType::kFloat32, {regions_.elements()}, {1}, {}};
  }

  void pack() { cpu::pack(view_, regions_, buffer_view_); }
  void unpack() { cpu::unpack(buffer_view_, regions_, view_); }
  void unpack_add() { cpu::unpack_add(buffer_view_, regions_, view_); }

  // Returns whether the face's elements are `factor` times the buffer's, by a loop over the box.
  bool buffer_is_face(float factor) const {
    const Box& box = regions_.parts().front().box;
    std::size_t at = 0;
    Coords i = box.lo();
    for (i[1] = box.lo()[1]; i[1] < box.hi()[1]; ++i[1])
      for (i[2] = box.lo()[2]; i[2] < box.hi()[2]; ++i[2])
        for (i[3] = box.lo()[3]; i[3] < box.hi()[3]; ++i[3])
          for (i[4] = box.lo()[4]; i[4] < box.hi()[4]; ++i[4]) {
            index_t offset = 0;
            for (int dim = 0; dim < 5; ++dim) offset += i[dim] * view_.strides[dim];
            if (memory_[static_cast<std::size_t>(offset)] != factor * buffer_[at++]) return false;
          }
    return true;
  }
  std::size_t bytes() const { return buffer_.size() * sizeof(float); }

 private:
  ops::Regions regions_;
  std::vector<float> memory_, buffer_;
  TensorView view_, buffer_view_;
};

void run(benchmark::State& state, Fixture& fixture, void (Fixture::*kernel)()) {
  for (auto _ : state) {
    (fixture.*kernel)();
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(fixture.bytes()));
}

void bench_pack(benchmark::State& state, const Face& face, bool channels_last) {
  Fixture fixture(face, channels_last);
  fixture.pack();
  if (!fixture.buffer_is_face(1)) return state.SkipWithError("pack is wrong");
  run(state, fixture, &Fixture::pack);
}

void bench_unpack(benchmark::State& state, const Face& face) {
  Fixture fixture(face, false);
  fixture.unpack();  // of zeros
  if (!fixture.buffer_is_face(1)) return state.SkipWithError("unpack is wrong");
  run(state, fixture, &Fixture::unpack);
}

void bench_unpack_add(benchmark::State& state, const Face& face) {
  Fixture fixture(face, false);
  fixture.pack();
  fixture.unpack_add();
  if (!fixture.buffer_is_face(2)) return state.SkipWithError("unpack_add is wrong");
  run(state, fixture, &Fixture::unpack_add);
}

void bench_memcpy(benchmark::State& state) {
  std::vector<float> from(std::size_t{1} << 18, 1.0f), to(from.size());
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), from.size() * sizeof(float));
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() *
                          static_cast<std::int64_t>(from.size() * sizeof(float)));
}

const bool kRegistered = [] {
  benchmark::RegisterBenchmark("memcpy/1MB", bench_memcpy);
  for (const Face& face : kFaces) {
    const std::string name = face.name;
    benchmark::RegisterBenchmark(("pack/" + name).c_str(), bench_pack, face, false);
    benchmark::RegisterBenchmark(("pack/" + name + "/channels_last").c_str(), bench_pack, face,
                                 true);
    benchmark::RegisterBenchmark(("unpack/" + name).c_str(), bench_unpack, face);
    benchmark::RegisterBenchmark(("unpack_add/" + name).c_str(), bench_unpack_add, face);
  }
  return true;
}();

}  // namespace
}  // namespace pydist
