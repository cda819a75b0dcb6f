// The CPU launcher: rows over threads, a vectorized loop along each run.
//
// Bodies see the same loop as on a device, with one lane. Results do not depend on the threads:
// rows are independent of each other (RunBody).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "launch/host_device.hpp"
#include "launch/run_body.hpp"
#include "launch/thread_pool.hpp"

namespace pydist::launch {

// Work below which a second thread costs more than it gains: it takes 5 to 20 us to wake one.
inline constexpr index_t kBytesPerThread = 256 * 1024;

// The loop that the launcher passes to RunBody::each.
struct VectorLoop {
  template <class At>
  PYDIST_HD void operator()(index_t count, const At& at) const {
    PYDIST_INDEPENDENT
    for (index_t j = 0; j < count; ++j) at(j);
  }
  void copy(char* to, const char* from, index_t bytes) const {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
};

// Runs `body` on the CPU. `bytes`: memory traffic of the full launch, to choose the threads.
template <RunBody Body>
void run_on_cpu(const Body& body, index_t bytes) {
  const index_t rows = body.rows();
  const index_t threads =
      std::clamp<index_t>(bytes / kBytesPerThread, 1, std::min<index_t>(num_threads(), rows + 1));
  // A few chunks per thread balance rows of different length.
  const index_t chunks = threads == 1 ? 1 : std::min(rows, 4 * threads);
  parallel_for(chunks, chunks / threads, [&](index_t chunk) {
    const index_t end = (chunk + 1) * rows / chunks;
    for (index_t r = chunk * rows / chunks; r < end; ++r) body.each(body.row(r), VectorLoop{});
  });
}

}  // namespace pydist::launch
