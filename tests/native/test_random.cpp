// Keyed random numbers: Random123's vectors, and the CPU against emulated warps.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "launch/emulate.hpp"
#include "ops/random/body.hpp"
#include "ops/random/kernels.hpp"
#include "random_cases.hpp"

namespace pydist {
namespace {

using launch::ThreadOrder;
using testing::Random;

TEST(Philox, GivesTheVectorsOfRandom123) {
  using ops::Philox4;
  using ops::philox4x32_10;
  const auto words = [](const Philox4& p) {
    return std::array{p.word0, p.word1, p.word2, p.word3};
  };
  constexpr std::uint32_t kOnes = 0xffffffffu;
  EXPECT_EQ(words(philox4x32_10({0, 0, 0, 0}, 0, 0)),
            (std::array{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(words(philox4x32_10({kOnes, kOnes, kOnes, kOnes}, kOnes, kOnes)),
            (std::array{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(words(philox4x32_10({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, 0xa4093822u,
                                0x299f31d0u)),
            (std::array{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(KeyedUniform, IsTheSameOnCpuAndInEmulatedWarps) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const int ndim = static_cast<int>(random.between(1, 4));
    Coords extent(ndim), lo(ndim), shape(ndim);
    for (int dim = 0; dim < ndim; ++dim) {
      extent[dim] = random.between(1, 12);
      lo[dim] = random.between(0, 5);
      shape[dim] = lo[dim] + extent[dim] + random.between(0, 5);
    }
    std::vector<double> memory(static_cast<std::size_t>(volume_of(extent)), -1.0);
    const TensorView out{memory.data(), DType::kFloat64, extent, random.strides_for(extent), {}};
    cpu::keyed_uniform(out, {.value = seed}, lo, shape);
    const std::vector<double> on_cpu = memory;
    const ops::KeyedBox box = ops::keyed_box(out, {.value = seed}, lo, shape);
    const ops::KeyedUniform<double> body{memory.data(), box, volume_of(extent) / extent[ndim - 1]};
    for (const launch::RunGrid& grid : {launch::RunGrid{1, 32}, launch::RunGrid{2, 4},
                                        launch::RunGrid{1, 1}, launch::run_grid(body.rows(), 8)}) {
      std::fill(memory.begin(), memory.end(), -1.0);
      launch::emulate_runs(body, grid, ThreadOrder::kReverse);
      ASSERT_EQ(memory, on_cpu);
    }
  }
}

}  // namespace
}  // namespace pydist
