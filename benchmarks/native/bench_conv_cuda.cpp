// Boundary convolution of one slab on a CUDA device: the tensor-core kernel and the tiled one, on
// layers of CosmoFlow and of the 3D U-Net. Each verifies its result before it is timed, by events
// around one call on data in the cache, like a slab that was just received.
//
// "useful": the fraction of the tensor cores' multiply-adds that the result needs; "blocks" of the
// launch. Both are counted, and are also printed without a device.
#include <cmath>
#include <cstdio>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "on_device.hpp"
#include "ops/conv/kernels.hpp"
#include "ops/conv/mma_choice.hpp"

namespace pydist::bench {
namespace {

using ops::BFloat16;
using ops::ConvMath;
using ops::ConvOp;
using ops::ConvProblem;

struct Layer {
  const char* name;
  index_t in_channels, out_channels;
  Coords slab;  // spatial; the thin dim has extent 1
};

// Shards of 128^3 of a 512^3 sample, and the layers after pooling.
const Layer kLayers[] = {
    {"cosmoflow1_4x16_depth128", 4, 16, {1, 128, 128}},
    {"cosmoflow1_4x16_width128", 4, 16, {128, 128, 1}},
    {"cosmoflow2_16x32_depth64", 16, 32, {1, 64, 64}},
    {"cosmoflow3_32x64_depth32", 32, 64, {1, 32, 32}},
    {"cosmoflow4_64x128_depth16", 64, 128, {1, 16, 16}},
    {"cosmoflow5_128x256_depth8", 128, 256, {1, 8, 8}},
    {"unet_32x64_depth128", 32, 64, {1, 128, 128}},
    {"unet_64x64_height64", 64, 64, {64, 1, 64}},
    {"unet_128x256_depth32", 128, 256, {1, 32, 32}},
};

struct Format {
  const char* name;
  DType dtype;
  std::optional<ConvMath> math;  // none: the tiled kernel
  double bound;                  // of the error, relative to the largest result
};
const Format kFormats[] = {
    {"bf16_mma", DType::kBFloat16, ConvMath::kTf32, 0x1p-7},
    {"bf16_tile", DType::kBFloat16, std::nullopt, 0x1p-7},
    {"fp32_tf32", DType::kFloat32, ConvMath::kTf32, 0x1p-9},
    {"fp32_mma", DType::kFloat32, ConvMath::kTf32x3, 1e-5},
    {"fp32_tile", DType::kFloat32, std::nullopt, 1e-5},
};
const char* const kOps[] = {"forward", "dgrad", "wgrad"};

// An array in channels-last order: on the host in fp64, with values that are exact in its type, and
// on the device in its type.
struct Array {
  std::vector<double> values;
  std::vector<char> bytes;
  TensorView view;

  Array(const Coords& shape, DType dtype, unsigned seed) {
    std::minstd_rand engine(seed);
    std::uniform_real_distribution<float> uniform(-1, 1);
    ops::dispatch_floating(dtype, [&]<class Storage>(std::type_identity<Storage>) {
      for (index_t i = 0; i < volume_of(shape); ++i) {
        const Storage value = ops::store_as<Storage>(uniform(engine));
        values.push_back(ops::load_as(value));
        const auto* const part = reinterpret_cast<const char*>(&value);
        bytes.insert(bytes.end(), part, part + sizeof(Storage));
      }
    });
    Coords strides(5);
    index_t stride = 1;
    for (const int dim : {1, 4, 3, 2, 0}) {
      strides[dim] = stride;
      stride *= shape[dim];
    }
    view = {values.data(), DType::kFloat64, shape, strides, {}};
  }
};

struct Case {
  Array in, weight, out;
  ops::ConvAttributes attributes;
  double flops;

  Case(const Layer& layer, DType dtype)
      : in(shape(1, layer.in_channels, layer.slab), dtype, 1),
        weight({layer.out_channels, layer.in_channels, 3, 3, 3}, dtype, 2),
        out(shape(1, layer.out_channels, layer.slab), dtype, 3),
        attributes{Coords(3), Coords(3), {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1} {
    for (int dim = 0; dim < 3; ++dim) {
      if (layer.slab[dim] == 1) attributes.in_lo[dim] = -1;
    }
    flops =
        18.0 * static_cast<double>(layer.in_channels * layer.out_channels * volume_of(layer.slab));
  }
  static Coords shape(index_t batch, index_t channels, const Coords& spatial) {
    return {batch, channels, spatial[0], spatial[1], spatial[2]};
  }
  ConvProblem on_host() const {
    return ops::conv_problem(in.view, weight.view, out.view, attributes);
  }
  // The problem with arrays in other memory, in their own type.
  ConvProblem problem(DType dtype, void* x, void* w, void* y) const {
    ConvProblem problem = on_host();
    problem.dtype = dtype;
    problem.in.data = x;
    problem.weight.data = w;
    problem.out.data = y;
    return problem;
  }
  const Array& target(int op) const { return op == 0 ? out : op == 1 ? in : weight; }
};

// (blocks of the launch, floats of workspace, useful part)
struct Plan {
  index_t blocks, workspace;
  double useful;
};
template <ConvOp kOp>
Plan plan_of(const ConvProblem& problem, ConvMath math) {
  Plan plan{};
  ops::with_mma_body<kOp>(problem, math, [&]<class Body>(std::type_identity<Body>) {
    const Body body = Body::make(problem, nullptr);
    plan = {body.blocks(), body.partial_elements(), body.useful()};
  });
  return plan;
}
Plan plan_of(int op, const ConvProblem& problem, ConvMath math) {
  if (op == 0) return plan_of<ConvOp::kForward>(problem, math);
  if (op == 1) return plan_of<ConvOp::kDgrad>(problem, math);
  return plan_of<ConvOp::kWgrad>(problem, math);
}

void run(int op, const ConvProblem& problem, const cuda::MmaCall& mma) {
  const cuda::Queue queue{0, nullptr};
  if (op == 0) return cuda::boundary_conv_forward(problem, mma, queue);
  if (op == 1) return cuda::boundary_conv_dgrad(problem, mma, queue);
  cuda::boundary_conv_wgrad(problem, mma, queue);
}

std::vector<double> expected(const Case& given, int op) {
  Case sums = given;
  sums.in.view.data = sums.in.values.data();
  sums.weight.view.data = sums.weight.values.data();
  sums.out.view.data = sums.out.values.data();
  if (op == 0) cpu::boundary_conv_forward(sums.on_host());
  if (op == 1) cpu::boundary_conv_dgrad(sums.on_host());
  if (op == 2) cpu::boundary_conv_wgrad(sums.on_host());
  return sums.target(op).values;
}

double error(const std::vector<double>& wanted, const Memory& found, DType dtype) {
  std::vector<char> bytes(wanted.size() * static_cast<std::size_t>(size_of(dtype)));
  check(cudaMemcpy(bytes.data(), found.data(), bytes.size(), cudaMemcpyDeviceToHost));
  double worst = 0, scale = 0;
  ops::dispatch_floating(dtype, [&]<class Storage>(std::type_identity<Storage>) {
    const auto* const values = reinterpret_cast<const Storage*>(bytes.data());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const double difference = std::abs(ops::load_as(values[i]) - wanted[i]);
      if (!(difference <= worst)) worst = difference;  // NaN too
      scale = std::max(scale, std::abs(wanted[i]));
    }
  });
  return worst / scale;
}

void bench(benchmark::State& state, const Layer& layer, int op, const Format& format) {
  const Case given(layer, format.dtype);
  const Array* const arrays[] = {&given.in, &given.weight, &given.out};
  const Memory x(given.in.bytes.size()), w(given.weight.bytes.size()), y(given.out.bytes.size());
  const Memory* const memories[] = {&x, &w, &y};
  for (int i = 0; i < 3; ++i) {
    check(cudaMemcpy(memories[i]->data(), arrays[i]->bytes.data(), arrays[i]->bytes.size(),
                     cudaMemcpyHostToDevice));
  }
  const ConvProblem problem = given.problem(format.dtype, x.data(), w.data(), y.data());
  const Plan plan = format.math ? plan_of(op, problem, *format.math) : Plan{};
  const Memory workspace(static_cast<std::size_t>(plan.workspace) * sizeof(float));
  cuda::MmaCall mma;
  if (format.math) mma = {*format.math, static_cast<float*>(workspace.data())};

  run(op, problem, mma);
  check(cudaDeviceSynchronize());
  if (!(error(expected(given, op), op == 0 ? y : op == 1 ? x : w, format.dtype) <= format.bound)) {
    return state.SkipWithError("the result is wrong");
  }
  run_on_device(state, [&] { run(op, problem, mma); });
  state.counters["flops"] =
      benchmark::Counter(given.flops * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate, benchmark::Counter::OneK::kIs1000);
  if (format.math) {
    state.counters["useful"] = plan.useful;
    state.counters["blocks"] = static_cast<double>(plan.blocks);
  }
}

}  // namespace

void print_conv_counts() {
  std::printf("no CUDA device: what can be counted without one\n%-28s %-8s %-10s %8s %8s\n",
              "layer", "op", "kernel", "useful", "blocks");
  for (const Layer& layer : kLayers) {
    for (int op = 0; op < 3; ++op) {
      for (const Format& format : kFormats) {
        if (!format.math) continue;
        const Case given(layer, format.dtype);
        const Plan plan =
            plan_of(op, given.problem(format.dtype, nullptr, nullptr, nullptr), *format.math);
        std::printf("%-28s %-8s %-10s %8.3f %8lld\n", layer.name, kOps[op], format.name,
                    plan.useful, static_cast<long long>(plan.blocks));
      }
    }
  }
}

void register_conv() {
  for (const Layer& layer : kLayers) {
    for (int op = 0; op < 3; ++op) {
      for (const Format& format : kFormats) {
        const std::string name =
            std::string("boundary_conv_") + kOps[op] + "/" + layer.name + "/" + format.name;
        benchmark::RegisterBenchmark(name.c_str(), bench, layer, op, format)->UseManualTime();
      }
    }
  }
}

}  // namespace pydist::bench
