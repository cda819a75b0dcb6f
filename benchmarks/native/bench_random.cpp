// Keyed random numbers, a million at a time.
#include <benchmark/benchmark.h>

#include <vector>

#include "ops/random/kernels.hpp"
#include "ops/random/philox.hpp"

namespace pydist {
namespace {

template <class T>
void bench_uniform(benchmark::State& state) {
  constexpr index_t kCount = 1 << 20;
  std::vector<T> values(kCount);
  const TensorView out{
      values.data(), sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64, {kCount}, {1}, {}};
  cpu::keyed_uniform(out, {.value = 5}, {3}, {kCount + 3});
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] != ops::uniform<T>(5, i + 3)) return state.SkipWithError("uniform is wrong");
  }
  for (auto _ : state) {
    cpu::keyed_uniform(out, {.value = 5}, {0}, {kCount});
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kCount * static_cast<std::int64_t>(sizeof(T)));
}
BENCHMARK(bench_uniform<float>)->Name("keyed_uniform/float32");
BENCHMARK(bench_uniform<double>)->Name("keyed_uniform/float64");

}  // namespace
}  // namespace pydist
