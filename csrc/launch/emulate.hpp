// The emulating launcher: the decomposition of cuda.cuh, thread by thread on the host.
//
// With AddressSanitizer it finds missing bounds guards. Threads run one after the other in several
// orders, and shared memory is poisoned before each step, which reveals missing barriers. It does
// not find races within one phase. Where warps compute together, each warp does all work between
// two barriers before the next warp begins.
//
// For tests: they run a body in several of kThreadOrders and compare every result with a plain
// loop. A body that depends on the order of its threads gives different results. Poison is bytes of
// 0xff: a NaN in every floating-point type, and an index that is out of bounds.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/errors.hpp"
#include "launch/decomposition.hpp"

namespace pydist::launch {

// The order in which threads, blocks and rows run. kStrided takes every seventh of them, seven
// times: neighbors, also within a warp, do not run one after the other.
enum class ThreadOrder { kForward, kReverse, kStrided };

inline constexpr ThreadOrder kThreadOrders[] = {ThreadOrder::kForward, ThreadOrder::kReverse,
                                                ThreadOrder::kStrided};

// Calls f(i) once for each 0 <= i < count, in the given order.
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

// Emulates run_kernel of cuda.cuh. grid: that of the device, or a smaller one, in which threads
// take several rows.
template <RunBody Body>
void emulate_runs(const Body& body, const RunGrid& grid, ThreadOrder order) {
  in_order(order, grid.threads(), [&](index_t thread) { run_thread(body, grid, thread); });
}

// The registers of the threads of a block, poisoned: on a device they have any content.
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

// A warp's copies into shared memory, which are done when the launcher waits for them, and not
// before: the latest time that AsyncCopies of cuda.cuh permits. A body that reads a stage too early
// reads poison.
class DeferredCopies {
 public:
  // Both addresses must be aligned to kBytes, as cp.async requires. If not `inside`, `from` is not
  // read, and zeros are stored.
  template <int kBytes>
  void copy(void* to, const void* from, bool inside) {
    PYDIST_INVARIANT(reinterpret_cast<std::uintptr_t>(to) % kBytes == 0);
    PYDIST_INVARIANT(reinterpret_cast<std::uintptr_t>(from) % kBytes == 0);
    open_.push_back({to, inside ? from : nullptr, kBytes});
  }
  // Closes a group of copies, which may be empty.
  void commit() { groups_.push_back(std::move(open_)), open_.clear(); }
  // Does all copies but those of the newest `in_flight` groups.
  void wait(std::size_t in_flight) {
    for (; groups_.size() > in_flight; groups_.pop_front()) {
      for (const Pending& copy : groups_.front()) {
        if (copy.from != nullptr) {
          std::memcpy(copy.to, copy.from, copy.bytes);
        } else {
          std::memset(copy.to, 0, copy.bytes);
        }
      }
    }
  }

 private:
  struct Pending {
    void* to;
    const void* from;
    std::size_t bytes;
  };
  std::vector<Pending> open_;
  std::deque<std::vector<Pending>> groups_;
};

// One block of warp_tile_kernel of cuda.cuh, warp after warp. A stage is poisoned after its step.
//
// Call run, then share, then end. On a device a barrier of the cluster separates the last two:
// emulate_warp_tiles calls each for all blocks of a cluster before it calls the next.
template <WarpTileBody Body>
class EmulatedWarpTile {
 public:
  using Thread = typename Body::Thread;
  using Stage = typename Body::Stage;
  using Sums = typename Body::Sums;
  static_assert(Body::kThreads % kWarp == 0);

  EmulatedWarpTile(const Body& body, index_t block, ThreadOrder order)
      : body_(body), block_(block), order_(order) {}

  // The steps, until the sums are complete in the threads' registers. The first kStages - 1 turns
  // only fetch (their step is negative), and later ones compute a step while the next are fetched.
  void run() {
    constexpr int kStages = Body::kStages;
    std::memset(static_cast<void*>(memory_.get()), 0xff, sizeof(Memory));  // NaN in every format
    each_thread(
        [&](int thread, Thread& state) { body_.begin(block_, thread, state, memory_->table); });
    std::vector<DeferredCopies> copies(Body::kThreads / kWarp);
    const index_t steps = body_.steps(block_);
    for (index_t step = 1 - kStages; step < steps; ++step) {
      in_order(order_, Body::kThreads / kWarp, [&](index_t warp) {
        Thread* const lanes = threads_.data() + warp * kWarp;
        const int first = static_cast<int>(warp) * kWarp;
        auto& own = copies[static_cast<std::size_t>(warp)];
        const index_t next = step + kStages - 1;
        if (next < steps) {
          in_order(order_, kWarp, [&](index_t lane) {
            body_.fetch(next, first + static_cast<int>(lane), lanes[lane], memory_->table,
                        memory_->stages()[next % kStages], own);
          });
        }
        own.commit();
        for (int slice = 0; step >= 0 && slice < Body::kSlices; ++slice) {
          in_order(order_, kWarp, [&](index_t lane) {
            body_.load(slice, first + static_cast<int>(lane), memory_->stages()[step % kStages],
                       lanes[lane]);
          });
          body_.multiply(step, slice, static_cast<int>(warp), Warp<Thread>{lanes});
        }
        if (step >= -1) own.wait(kStages - 2);
      });
      if (step >= 0) {
        std::memset(static_cast<void*>(&memory_->stages()[step % kStages]), 0xff, sizeof(Stage));
      }
    }
  }
  // Stores the sums in shared memory, which the stages have left.
  void share() {
    std::memset(memory_->bytes, 0xff, sizeof(memory_->bytes));
    each_thread([&](int thread, Thread& state) { body_.share(block_, thread, state, sums()); });
  }
  Sums& sums() { return *reinterpret_cast<Sums*>(memory_->bytes); }
  // Writes this block's part of the cluster's result. peers(rank): the sums of a block.
  template <class Peers>
  void end(const Peers& peers) {
    each_thread([&](int thread, Thread&) { body_.end(block_, thread, peers); });
  }

 private:
  // Shared memory: the bytes hold the stages, then the sums.
  struct Memory {
    typename Body::Table table;
    alignas(16) unsigned char bytes[kWarpTileBytes<Body>];

    Stage* stages() { return reinterpret_cast<Stage*>(bytes); }
  };

  template <class Phase>
  void each_thread(const Phase& phase) {
    in_order(order_, Body::kThreads, [&](index_t thread) {
      phase(static_cast<int>(thread), threads_[static_cast<std::size_t>(thread)]);
    });
  }

  const Body& body_;
  index_t block_;
  ThreadOrder order_;
  std::unique_ptr<Memory> memory_ = std::make_unique<Memory>();
  std::vector<Thread> threads_ = fresh_threads<Thread>(Body::kThreads);
};

// Emulates warp_tile_kernel of cuda.cuh, cluster after cluster. Test body.alone() as well: devices
// without clusters run that.
template <WarpTileBody Body>
void emulate_warp_tiles(const Body& body, ThreadOrder order) {
  const int size = body.cluster();
  PYDIST_INVARIANT(size >= 1 && size <= kMaxCluster && body.blocks() % size == 0);
  in_order(order, body.blocks() / size, [&](index_t cluster) {
    std::vector<EmulatedWarpTile<Body>> blocks;
    for (int rank = 0; rank < size; ++rank) blocks.emplace_back(body, cluster * size + rank, order);
    for (auto& block : blocks) block.run();
    for (auto& block : blocks) block.share();
    const auto peers = [&](int rank) -> const typename Body::Sums& {
      PYDIST_INVARIANT(rank >= 0 && rank < size);
      return blocks[static_cast<std::size_t>(rank)].sums();
    };
    in_order(order, size, [&](index_t rank) { blocks[static_cast<std::size_t>(rank)].end(peers); });
  });
}

}  // namespace pydist::launch
