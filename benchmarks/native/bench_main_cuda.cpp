// Microbenchmarks of the CUDA kernels, and of NCCL's messages beside them. Each verifies its result
// before it is timed.
#include <benchmark/benchmark.h>

#include "on_device.hpp"

int main(int argc, char** argv) {
  if (pydist::cuda::device_count() == 0) {
    pydist::bench::print_conv_counts();
    return 0;
  }
  pydist::bench::register_conv();
  pydist::bench::register_pack();
  pydist::bench::register_exchange();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  pydist::bench::close_exchange();
}
