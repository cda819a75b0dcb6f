// The emulating launcher: the decomposition of cuda.cuh, thread by thread on the host.
//
// With AddressSanitizer it finds missing bounds guards; because threads run one after the other in
// several orders, and shared memory is poisoned before each step, it finds data that is used
// without a barrier in between. It does not find races within one phase.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "launch/decomposition.hpp"

namespace pydist::launch {

enum class ThreadOrder { kForward, kReverse, kStrided };

inline constexpr ThreadOrder kThreadOrders[] = {ThreadOrder::kForward, ThreadOrder::kReverse,
                                                ThreadOrder::kStrided};

// Calls f(i) for 0 <= i < count, in the given order.
template <class F>
void in_order(ThreadOrder order, index_t count, const F& f) {
  constexpr index_t kStride = 7;
  switch (order) {
    case ThreadOrder::kForward:
      for (index_t i = 0; i < count; ++i) f(i);
      return;
    case ThreadOrder::kReverse:
      for (index_t i = count - 1; i >= 0; --i) f(i);
      return;
    case ThreadOrder::kStrided:
      for (index_t first = 0; first < kStride; ++first) {
        for (index_t i = first; i < count; i += kStride) f(i);
      }
      return;
  }
}

template <RunBody Body>
void emulate_runs(const Body& body, const RunGrid& grid, ThreadOrder order) {
  in_order(order, grid.threads(), [&](index_t thread) { run_thread(body, grid, thread); });
}

template <TileBody Body>
void emulate_tiles(const Body& body, ThreadOrder order) {
  using Shared = typename Body::Shared;
  const auto shared = std::make_unique<Shared>();
  in_order(order, body.blocks(), [&](index_t block) {
    std::vector<typename Body::Thread> threads(Body::kThreads);
    const auto each_thread = [&](const auto& phase) {
      in_order(order, Body::kThreads, [&](index_t thread) {
        phase(static_cast<int>(thread), threads[static_cast<std::size_t>(thread)]);
      });
    };
    each_thread([&](int thread, auto& state) { body.begin(block, thread, state); });
    for (index_t step = 0; step < body.steps(block); ++step) {
      std::memset(static_cast<void*>(shared.get()), 0xff, sizeof(Shared));  // NaN in every format
      each_thread([&](int thread, auto& state) { body.load(block, step, thread, state, *shared); });
      each_thread([&](int thread, auto& state) { body.compute(thread, *shared, state); });
    }
    each_thread([&](int thread, auto& state) { body.end(block, thread, state); });
  });
}

}  // namespace pydist::launch
