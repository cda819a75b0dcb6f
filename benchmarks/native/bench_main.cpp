// Microbenchmarks of the CPU kernels. Each verifies its result before it is timed;
// bytes_per_second counts the payload (elements packed, convolved or drawn), so that it is
// comparable with memcpy's.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <string>

#include "isa/isa.hpp"
#include "launch/thread_pool.hpp"

int main(int argc, char** argv) {
  if (const char* threads = std::getenv("PYDIST_NUM_THREADS")) {
    pydist::launch::set_num_threads(std::atoi(threads));
  } else {
    pydist::launch::set_num_threads(1);
  }
  benchmark::AddCustomContext("pydist_isa", pydist::isa::name());
  benchmark::AddCustomContext("pydist_threads", std::to_string(pydist::launch::num_threads()));
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
