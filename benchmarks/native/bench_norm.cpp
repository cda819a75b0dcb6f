// Batch norm followed by a ReLU: its four passes over memory, on activations of a 3D U-Net.
#include <benchmark/benchmark.h>

#include <cmath>
#include <string>
#include <vector>

#include "ops/norm/kernels.hpp"

namespace pydist {
namespace {

struct Shape {
  const char* name;
  index_t samples, channels, positions;
};

const Shape kShapes[] = {{"1x32x64^3", 1, 32, 64 * 64 * 64}, {"2x64x32^3", 2, 64, 32 * 32 * 32}};
constexpr index_t kParts = 16;

struct Fixture {
  std::vector<float> x, grad, out, values, coefficients;
  std::vector<double> sums;
  ops::NormProblem problem;

  Fixture(const Shape& shape, bool channels_last)
      : values(static_cast<std::size_t>(3 * shape.channels), 0.5f),
        coefficients(values),
        sums(static_cast<std::size_t>(2 * kParts * shape.channels)) {
    const index_t count = shape.samples * shape.channels * shape.positions;
    for (index_t i = 0; i < count; ++i) x.push_back(static_cast<float>(i % 17) - 8);
    for (index_t i = 0; i < count; ++i) grad.push_back(static_cast<float>(i % 13) - 6);
    out.resize(x.size());
    problem = {DType::kFloat32,
               {shape.samples, shape.channels, shape.positions, channels_last, false},
               0.0,
               false,
               x.data(),
               grad.data(),
               out.data(),
               values.data(),
               coefficients.data(),
               sums.data(),
               kParts};
  }
  Fixture(const Fixture&) = delete;
};

// Returns whether each channel has the result of periodic values: 17 different ones.
bool holds(Fixture& fixture) {
  const ops::NormShape& shape = fixture.problem.shape;
  cpu::norm_moments(fixture.problem);
  const auto count = static_cast<double>(shape.values(shape.positions));
  for (std::size_t c = 0; c < static_cast<std::size_t>(shape.channels); ++c) {
    const double var = fixture.sums[static_cast<std::size_t>(shape.channels) + c] / count;
    if (std::abs(fixture.sums[c]) > 0.01 || std::abs(var - 24) > 0.01) return false;
  }
  cpu::norm_apply(fixture.problem);
  return fixture.out[0] == 0 && fixture.out[16] == (8 - 0.5f) * 0.5f + 0.5f;
}

using Pass = void (*)(const ops::NormProblem&);

void bench(benchmark::State& state, const Shape& shape, bool channels_last, Pass pass, int arrays) {
  Fixture fixture(shape, channels_last);
  if (!holds(fixture)) return state.SkipWithError("wrong statistics or results");
  for (auto _ : state) {
    pass(fixture.problem);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * arrays *
                          static_cast<std::int64_t>(fixture.x.size() * sizeof(float)));
}

struct Named {
  const char* name;
  Pass pass;
  int arrays;  // read and written
};

const Named kPasses[] = {{"norm_moments", cpu::norm_moments, 1},
                         {"norm_apply", cpu::norm_apply, 2},
                         {"norm_grad_sums", cpu::norm_grad_sums, 2},
                         {"norm_grad_input", cpu::norm_grad_input, 3}};

const bool kRegistered = [] {
  for (const Shape& shape : kShapes) {
    for (const bool channels_last : {false, true}) {
      for (const Named& pass : kPasses) {
        const std::string name =
            std::string(pass.name) + "/" + shape.name + (channels_last ? "/channels_last" : "");
        benchmark::RegisterBenchmark(name.c_str(), bench, shape, channels_last, pass.pass,
                                     pass.arrays);
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace pydist
