// The decomposition of bodies into threads on a device. cuda.cuh runs it on a GPU, emulate.hpp on
// the host.
//
//   concept        work                            threads
//   RunBody        independent runs of elements    a warp or less per run, lanes along it
//   TileBody       tiles, in steps                 a block per tile: load | compute | load | ...
//   WarpTileBody   tiles, with tensor cores        a block or a cluster per tile: stages in flight
//
// A body has no barrier and no warp intrinsic: those are in the launcher, so the same code runs on
// the host, thread by thread.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <type_traits>

#include "launch/host_device.hpp"
#include "launch/run_body.hpp"

namespace pydist::launch {

inline constexpr int kWarp = 32;
inline constexpr int kRunThreads = 256;     // of a block
inline constexpr int kMaxRunBlocks = 4096;  // fills any device; threads loop over more runs

// The threads of one launch: groups of `lanes` neighbors take one run at a time.
struct RunGrid {
  int blocks;
  int lanes;  // 1, 2, 4, ... kWarp

  PYDIST_HD index_t threads() const { return index_t{blocks} * kRunThreads; }
};

// `words`: accesses of an average run. A lane without work costs as much as one with.
inline RunGrid run_grid(index_t rows, index_t words) {
  int lanes = 1;
  while (lanes < kWarp && lanes < words) lanes *= 2;
  const index_t blocks = ceil_div(rows, kRunThreads / lanes);
  return {static_cast<int>(std::min<index_t>(blocks, kMaxRunBlocks)), lanes};
}

// Elements that a lane reads before it writes the first: 64 bytes of registers. A memory of 4 TB/s
// and 700 ns needs 20 KB in flight on each multiprocessor; 32 warps with one 16-byte word per lane
// have 16 KB, with one 2-byte element 2 KB.
template <class Value>
inline constexpr int kReadAhead = std::clamp(static_cast<int>(64 / sizeof(Value)), 2, 8);

// The loop that one lane passes to RunBody::each: neighboring lanes make neighboring accesses.
struct LaneLoop {
  int lane, lanes;

  template <class At>
  PYDIST_HD void operator()(index_t count, const At& at) const {
    if constexpr (TakenApart<At>) {
      constexpr int kAhead = kReadAhead<decltype(at.read(index_t{}))>;
      index_t first = lane;
      // Full batches have no bounds checks: otherwise a compiler would put each use of a value
      // under the same condition as its load, and so serialize the loads.
      for (; first + (kAhead - 1) * lanes < count; first += kAhead * lanes) {
        batch<kAhead, true>(first, count, at);
      }
      if (first < count) batch<kAhead, false>(first, count, at);
    } else {
      for (index_t j = lane; j < count; j += lanes) at(j);
    }
  }

 private:
  template <int kAhead, bool kWhole, class At>
  PYDIST_HD void batch(index_t first, index_t count, const At& at) const {
    decltype(at.read(first)) values[kAhead]{};
    PYDIST_UNROLLED
    for (int i = 0; i < kAhead; ++i) {
      if (kWhole || first + i * lanes < count) values[i] = at.read(first + i * lanes);
    }
    PYDIST_UNROLLED
    for (int i = 0; i < kAhead; ++i) {
      if (kWhole || first + i * lanes < count) at.write(first + i * lanes, values[i]);
    }
  }
};

// The work of one thread.
template <RunBody Body>
PYDIST_HD void run_thread(const Body& body, const RunGrid& grid, index_t thread) {
  const int lane = static_cast<int>(thread % grid.lanes);
  const index_t groups = grid.threads() / grid.lanes;
  for (index_t r = thread / grid.lanes; r < body.rows(); r += groups) {
    body.each(body.row(r), LaneLoop{lane, grid.lanes});
  }
}

// Work in blocks of threads that share memory. Every block makes steps(block) steps of two phases,
// load and compute, with a barrier after each; the barrier is in the launcher, so a body can't
// forget it. `Thread` is the state of a thread in registers, from begin to end.
template <class Body>
concept TileBody = requires(const Body body, index_t block, index_t step, int thread,
                            typename Body::Shared& shared, typename Body::Thread& state) {
  { Body::kThreads } -> std::convertible_to<int>;
  requires std::is_trivially_copyable_v<typename Body::Shared>;
  { body.blocks() } -> std::convertible_to<index_t>;
  { body.steps(block) } -> std::convertible_to<index_t>;
  body.begin(block, thread, state);
  body.load(block, step, thread, state, shared);
  body.compute(thread, shared, state);
  body.end(block, thread, state);
};

// The threads of a warp between two barriers: on a device the calling thread's own state, in
// emulation that of all lanes, in order.
template <class Thread>
struct Warp {
  Thread* lanes;
};

// A placeholder for a launcher's copies into shared memory, to state the concept. They are in
// flight until the launcher waits for them; bytes that are not `inside` become zero.
struct AnyCopies {
  template <int kBytes>
  void copy(void*, const void*, bool) const {}
};

// A placeholder for the launcher's access to the sums of a cluster's blocks.
template <class Sums>
struct AnyPeers {
  const Sums& operator()(int) const;
};

// Work in blocks of warps whose lanes compute together. `begin` fills a table that the block
// shares; then up to kStages - 1 steps are fetched ahead while a step is computed from its stage,
// slice by slice: every lane loads its part, then the warp multiplies. Barriers and waits are in
// the launcher.
//
// The cluster() blocks from block b on, a multiple of that number, form a cluster; one block is one
// too. Each block stores its sums (share) where all of them can read them, and then writes a part
// of what the cluster has computed (end). Where a device has no clusters, the launcher runs
// alone(): the same work by clusters of one.
template <class Body>
concept WarpTileBody =
    requires(const Body body, index_t block, index_t step, int thread, typename Body::Table& table,
             typename Body::Stage& stage, typename Body::Thread& state, typename Body::Sums& sums,
             Warp<typename Body::Thread> warp) {
      { Body::kThreads } -> std::convertible_to<int>;
      { Body::kSlices } -> std::convertible_to<int>;
      { Body::kStages } -> std::convertible_to<int>;
      requires std::is_trivially_copyable_v<typename Body::Table>;
      requires std::is_trivially_copyable_v<typename Body::Stage>;
      requires std::is_trivially_copyable_v<typename Body::Sums>;
      { body.blocks() } -> std::convertible_to<index_t>;
      { body.cluster() } -> std::convertible_to<int>;
      { body.alone() } -> std::same_as<Body>;
      { body.steps(block) } -> std::convertible_to<index_t>;
      body.begin(block, thread, state, table);
      body.fetch(step, thread, state, table, stage, AnyCopies{});
      body.load(thread, thread, stage, state);
      body.multiply(step, thread, thread, warp);
      body.share(block, thread, state, sums);
      body.end(block, thread, AnyPeers<typename Body::Sums>{});
    };

inline constexpr int kMaxCluster = 8;  // blocks, on every device with clusters

// Shared memory of a block: the sums take the place of the stages.
template <class Body>
inline constexpr std::size_t kWarpTileBytes =
    std::max(sizeof(typename Body::Stage) * Body::kStages, sizeof(typename Body::Sums));

}  // namespace pydist::launch
