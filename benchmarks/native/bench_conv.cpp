// Boundary convolution of one slab, 3x3x3, on shapes of CosmoFlow and of a U-Net's first layers.
#include <benchmark/benchmark.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "ops/conv/kernels.hpp"

namespace pydist {
namespace {

struct Shape {
  const char* name;
  index_t in_channels, out_channels;
  Coords slab;  // spatial; the thin dim has extent 1
};

const Shape kShapes[] = {
    {"16x32_depth128", 16, 32, {1, 128, 128}}, {"16x32_height128", 16, 32, {128, 1, 128}},
    {"16x32_width128", 16, 32, {128, 128, 1}}, {"4x32_depth128", 4, 32, {1, 128, 128}},
    {"32x32_depth64", 32, 32, {1, 64, 64}},    {"256x256_depth8", 256, 256, {1, 8, 8}},
};

struct Array {
  std::vector<float> memory;
  TensorView view;

  explicit Array(const Coords& shape) : memory(static_cast<std::size_t>(volume_of(shape))) {
    std::minstd_rand engine(1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (float& value : memory) value = uniform(engine);
    Coords strides(shape.ndim());
    index_t stride = 1;
    for (int dim = shape.ndim() - 1; dim >= 0; --dim) {
      strides[dim] = stride;
      stride *= shape[dim];
    }
    view = {memory.data(), DType::kFloat32, shape, strides, {}};
  }
};

// The slab is right before an output plane of a "same" convolution: a halo received from below.
struct Fixture {
  Array in, weight, out;
  ops::ConvProblem problem;
  double flops;
  std::int64_t bytes;  // of the slab and of its output plane

  explicit Fixture(const Shape& shape)
      : in({1, shape.in_channels, shape.slab[0], shape.slab[1], shape.slab[2]}),
        weight({shape.out_channels, shape.in_channels, 3, 3, 3}),
        out({1, shape.out_channels, shape.slab[0], shape.slab[1], shape.slab[2]}) {
    Coords in_lo(3);
    for (int dim = 0; dim < 3; ++dim) in_lo[dim] = shape.slab[dim] == 1 ? -1 : 0;
    problem = ops::conv_problem(in.view, weight.view, out.view,
                                {in_lo, {0, 0, 0}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1});
    const index_t positions = volume_of(shape.slab);
    flops = 2.0 * 9 * static_cast<double>(shape.in_channels * shape.out_channels * positions);
    bytes = (shape.in_channels + shape.out_channels) * positions *
            static_cast<std::int64_t>(sizeof(float));
  }
};

using Kernel = void (*)(const ops::ConvProblem&);

// <y, A x> from one array of the triple, before and after the call: all three kernels are
// derivatives of the same trilinear form, so for fixed operands its increments must agree.
double form(Fixture fixture, Kernel kernel, Array Fixture::* target) {
  fixture.problem.in.data = fixture.in.memory.data();
  fixture.problem.weight.data = fixture.weight.memory.data();
  fixture.problem.out.data = fixture.out.memory.data();
  const std::vector<float> before = (fixture.*target).memory;
  kernel(fixture.problem);
  double sum = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    sum += (static_cast<double>((fixture.*target).memory[i]) - before[i]) * before[i];
  }
  return sum;
}

bool agrees(const Fixture& fixture) {
  const double forward = form(fixture, &cpu::boundary_conv_forward, &Fixture::out);
  const double dgrad = form(fixture, &cpu::boundary_conv_dgrad, &Fixture::in);
  const double wgrad = form(fixture, &cpu::boundary_conv_wgrad, &Fixture::weight);
  const double scale = 1e-5 * std::sqrt(fixture.flops);
  return std::abs(forward - dgrad) < scale && std::abs(forward - wgrad) < scale && forward != 0;
}

void bench(benchmark::State& state, const Shape& shape, Kernel kernel) {
  Fixture fixture(shape);
  if (!agrees(fixture)) return state.SkipWithError("forward, dgrad and wgrad disagree");
  for (auto _ : state) {
    kernel(fixture.problem);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * fixture.bytes);
  state.counters["flops"] =
      benchmark::Counter(fixture.flops * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate, benchmark::Counter::OneK::kIs1000);
}

const bool kRegistered = [] {
  for (const Shape& shape : kShapes) {
    const std::string name = shape.name;
    benchmark::RegisterBenchmark(("boundary_conv_forward/" + name).c_str(), bench, shape,
                                 &cpu::boundary_conv_forward);
    benchmark::RegisterBenchmark(("boundary_conv_dgrad/" + name).c_str(), bench, shape,
                                 &cpu::boundary_conv_dgrad);
    benchmark::RegisterBenchmark(("boundary_conv_wgrad/" + name).c_str(), bench, shape,
                                 &cpu::boundary_conv_wgrad);
  }
  return true;
}();

}  // namespace
}  // namespace pydist
