// The native core's own threads. Kernels use them through cpu.hpp.
#pragma once

#include <algorithm>

#include "core/index.hpp"

namespace pydist::launch {

// Threads that one kernel may use, the calling one included; for the full process. The initial
// value is OMP_NUM_THREADS, else the CPUs of this process. Results never depend on it.
int num_threads();
void set_num_threads(int threads);  // >= 1

using Task = void (*)(void* context, index_t index);

// Calls task(context, i) for 0 <= i < count on up to `threads` threads and returns when all are
// done. If a task throws, such as for want of memory, no others begin, and the caller gets the
// first exception. May be called from several threads concurrently: the pool serves one caller at a
// time, the others run their tasks themselves. Threads are made on first use, and again in a forked
// child.
void run_tasks(index_t count, int threads, Task task, void* context);

// Calls body(i) for 0 <= i < count. `grain`: the least number of calls worth waking a thread for.
template <class Body>
void parallel_for(index_t count, index_t grain, const Body& body) {
  const index_t useful = count / std::max<index_t>(grain, 1);
  const int threads = static_cast<int>(std::clamp<index_t>(useful, 1, num_threads()));
  if (threads == 1) {
    for (index_t i = 0; i < count; ++i) body(i);
    return;
  }
  run_tasks(
      count, threads, [](void* context, index_t i) { (*static_cast<const Body*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace pydist::launch
