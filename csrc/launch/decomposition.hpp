// How bodies are cut into threads on a device. cuda.cuh runs this on a GPU, emulate.hpp on the
// host.
#pragma once

#include <algorithm>
#include <concepts>
#include <type_traits>

#include "launch/host_device.hpp"
#include "launch/run_body.hpp"

namespace pydist::launch {

inline constexpr int kWarp = 32;
inline constexpr int kRunThreads = 256;     // of a block
inline constexpr int kMaxRunBlocks = 4096;  // threads walk on from there: enough to fill any device

// The threads of one launch: groups of `lanes` neighbours take one run at a time.
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

// The loop that one lane hands to RunBody::each: neighbouring lanes make neighbouring accesses.
struct LaneLoop {
  int lane, lanes;

  template <class At>
  PYDIST_HD void operator()(index_t count, const At& at) const {
    for (index_t j = lane; j < count; j += lanes) at(j);
  }
};

// All that one thread does.
template <RunBody Body>
PYDIST_HD void run_thread(const Body& body, const RunGrid& grid, index_t thread) {
  const int lane = static_cast<int>(thread % grid.lanes);
  const index_t groups = grid.threads() / grid.lanes;
  for (index_t r = thread / grid.lanes; r < body.rows(); r += groups) {
    body.each(body.row(r), LaneLoop{lane, grid.lanes});
  }
}

// Work in blocks of threads that share memory. Every block makes steps(block) steps of two phases,
// load and compute, with a barrier behind each; the barrier belongs to the launcher, so the body
// has none to forget. `Thread` is what a thread keeps in registers from begin to end.
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

}  // namespace pydist::launch
