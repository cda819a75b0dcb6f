// Average pooling 3/2/1, forward and backward, on activations of CosmoFlow's first layers, alone
// and with the preceding leaky ReLU in the same pass.
#include <benchmark/benchmark.h>

#include <cmath>
#include <string>
#include <vector>

#include "ops/pool/kernels.hpp"

namespace pydist {
namespace {

struct Shape {
  const char* name;
  Coords in;
};

const Shape kShapes[] = {{"16x64x128x128", {1, 16, 64, 128, 128}},
                         {"16x32x64x64", {1, 16, 32, 64, 64}}};

// The alignment of torch's tensors.
struct alignas(64) CacheLine {
  float values[16];
};

struct Array {
  std::vector<CacheLine> memory;
  TensorView view;

  Array(const Coords& shape, bool channels_last)
      : memory(static_cast<std::size_t>(volume_of(shape) / 16)) {
    int i = 0;
    for (CacheLine& line : memory) {
      for (float& value : line.values) value = static_cast<float>(i++ % 17) - 8;
    }
    Coords strides(5);
    index_t stride = 1;
    for (const int dim : {1, 4, 3, 2, 0}) {
      if (dim == 1 && !channels_last) continue;
      strides[dim] = stride;
      stride *= shape[dim];
      if (dim == 2 && !channels_last) {
        strides[1] = stride;
        stride *= shape[1];
      }
    }
    view = {memory.data(), DType::kFloat32, shape, strides, {}};
  }
};

ops::PoolAttributes windows() {
  const Footprint footprint(3, 2, 1, 1, 1);
  return {{0, 0, 0}, {0, 0, 0}, {footprint, footprint, footprint}};
}

struct Fixture {
  Array in, out;
  std::vector<double> mean, one;
  ops::PoolProblem problem;

  Fixture(const Coords& shape, bool channels_last)
      : in(shape, channels_last),
        out({shape[0], shape[1], shape[2] / 2, shape[3] / 2, shape[4] / 2}, channels_last),
        mean(static_cast<std::size_t>(shape[2]), 1.0 / 27),
        one(static_cast<std::size_t>(shape[3] + shape[4]), 1.0) {
    problem = ops::pool_problem(in.view, out.view, windows(), {mean.data(), one.data(), one.data()},
                                false);
  }
  Fixture(const Fixture&) = delete;
};

double dot(const std::vector<CacheLine>& a, const std::vector<CacheLine>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (int j = 0; j < 16; ++j) sum += static_cast<double>(a[i].values[j]) * b[i].values[j];
  }
  return sum;
}

// <y, A x> = <A* y, x>
bool adjoint(Fixture& fixture) {
  const std::vector<CacheLine> x = fixture.in.memory, y = fixture.out.memory;
  cpu::pool_sum_forward(fixture.problem);
  const double forward = dot(fixture.out.memory, y);
  fixture.out.memory.assign(y.begin(), y.end());
  cpu::pool_sum_backward(fixture.problem);
  const double backward = dot(fixture.in.memory, x);
  return forward != 0 && std::abs(forward - backward) < 1e-4 * std::sqrt(dot(x, x));
}

void bench(benchmark::State& state, const Shape& shape, bool channels_last, bool forward,
           bool rectified) {
  Fixture fixture(shape.in, channels_last);
  if (!adjoint(fixture)) return state.SkipWithError("forward and backward disagree");
  const Array gate(shape.in, channels_last);
  if (rectified) {
    fixture.problem.slope = 0.01;
    fixture.problem.gate = gate.view.data;
  }
  for (auto _ : state) {
    if (forward) {
      cpu::pool_sum_forward(fixture.problem);
    } else {
      cpu::pool_sum_backward(fixture.problem);
    }
    benchmark::ClobberMemory();
  }
  // Bytes read and written: twice the count for memcpy.
  const index_t gated = rectified && !forward ? gate.view.bytes() : 0;
  state.SetBytesProcessed(state.iterations() *
                          (fixture.in.view.bytes() + fixture.out.view.bytes() + gated));
}

const bool kRegistered = [] {
  for (const Shape& shape : kShapes) {
    for (const bool channels_last : {false, true}) {
      for (const bool rectified : {false, true}) {
        const std::string name = std::string("/") + shape.name +
                                 (channels_last ? "/channels_last" : "") +
                                 (rectified ? "/leaky_relu" : "");
        benchmark::RegisterBenchmark(("pool_sum_forward" + name).c_str(), bench, shape,
                                     channels_last, true, rectified);
        benchmark::RegisterBenchmark(("pool_sum_backward" + name).c_str(), bench, shape,
                                     channels_last, false, rectified);
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace pydist
