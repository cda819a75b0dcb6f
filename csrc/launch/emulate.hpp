// The emulating launcher: the decomposition of cuda.cuh, thread by thread on the host.
//
// With AddressSanitizer it finds missing bounds guards. Threads run one after the other in several
// orders, and shared memory is poisoned before each step, which reveals missing barriers. It does
// not find races within one phase. Where warps compute together, each warp does all work between
// two barriers before the next warp begins.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "core/errors.hpp"
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

// Emulates run_kernel of cuda.cuh.
template <RunBody Body>
void emulate_runs(const Body& body, const RunGrid& grid, ThreadOrder order) {
  in_order(order, grid.threads(), [&](index_t thread) { run_thread(body, grid, thread); });
}

// The registers of the threads of a block, uninitialized as on a device.
template <class Thread>
std::vector<Thread> fresh_threads(int count) {
  static_assert(std::is_trivially_copyable_v<Thread>);
  std::vector<Thread> threads(static_cast<std::size_t>(count));
  std::memset(static_cast<void*>(threads.data()), 0xff, threads.size() * sizeof(Thread));
  return threads;
}

// Emulates tile_kernel of cuda.cuh: all threads of a block do one phase before any does the next.
// Shared memory is poisoned before each step, so data that this step fails to load is NaN.
template <TileBody Body>
void emulate_tiles(const Body& body, ThreadOrder order) {
  using Shared = typename Body::Shared;
  const auto shared = std::make_unique<Shared>();
  in_order(order, body.blocks(), [&](index_t block) {
    auto threads = fresh_threads<typename Body::Thread>(Body::kThreads);
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

// Copies into shared memory that are done when the launcher waits for them, and not before.
class DeferredCopies {
 public:
  template <int kBytes>
  void copy(void* to, const void* from, bool inside) {
    PYDIST_INVARIANT(reinterpret_cast<std::uintptr_t>(to) % kBytes == 0);
    PYDIST_INVARIANT(reinterpret_cast<std::uintptr_t>(from) % kBytes == 0);
    pending_.push_back({to, inside ? from : nullptr, kBytes});
  }
  void wait() {
    for (const Pending& copy : pending_) {
      if (copy.from != nullptr) {
        std::memcpy(copy.to, copy.from, copy.bytes);
      } else {
        std::memset(copy.to, 0, copy.bytes);
      }
    }
    pending_.clear();
  }

 private:
  struct Pending {
    void* to;
    const void* from;
    std::size_t bytes;
  };
  std::vector<Pending> pending_;
};

// Emulates warp_tile_kernel of cuda.cuh, warp after warp. A stage is poisoned after its step.
template <WarpTileBody Body>
void emulate_warp_tiles(const Body& body, ThreadOrder order) {
  struct Memory {
    typename Body::Table table;
    typename Body::Stage stages[2];
  };
  using Thread = typename Body::Thread;
  static_assert(Body::kThreads % kWarp == 0);
  const auto memory = std::make_unique<Memory>();
  in_order(order, body.blocks(), [&](index_t block) {
    std::memset(static_cast<void*>(memory.get()), 0xff, sizeof(Memory));  // NaN in every format
    auto threads = fresh_threads<Thread>(Body::kThreads);
    in_order(order, Body::kThreads, [&](index_t thread) {
      body.begin(block, static_cast<int>(thread), threads[static_cast<std::size_t>(thread)],
                 memory->table);
    });
    const index_t steps = body.steps(block);
    for (index_t step = -1; step < steps; ++step) {
      in_order(order, Body::kThreads / kWarp, [&](index_t warp) {
        Thread* const lanes = threads.data() + warp * kWarp;
        const int first = static_cast<int>(warp) * kWarp;
        DeferredCopies copies;
        if (step + 1 < steps) {
          in_order(order, kWarp, [&](index_t lane) {
            body.fetch(block, step + 1, first + static_cast<int>(lane), lanes[lane], memory->table,
                       memory->stages[(step + 1) & 1], copies);
          });
        }
        for (int slice = 0; step >= 0 && slice < Body::kSlices; ++slice) {
          in_order(order, kWarp, [&](index_t lane) {
            body.load(slice, first + static_cast<int>(lane), memory->stages[step & 1], lanes[lane]);
          });
          body.multiply(block, step, slice, static_cast<int>(warp), Warp<Thread>{lanes});
        }
        copies.wait();
      });
      if (step >= 0) {
        std::memset(static_cast<void*>(&memory->stages[step & 1]), 0xff,
                    sizeof(typename Body::Stage));
      }
    }
    in_order(order, Body::kThreads, [&](index_t thread) {
      body.end(block, static_cast<int>(thread), threads[static_cast<std::size_t>(thread)]);
    });
  });
}

}  // namespace pydist::launch
