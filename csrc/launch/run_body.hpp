// RunBody: the concept of bodies for the three launchers (cpu.hpp, cuda.cuh, emulate.hpp).
#pragma once

#include <concepts>

#include "core/index.hpp"
#include "launch/host_device.hpp"

namespace pydist::launch {

// A placeholder for a launcher's loop, to state the concept.
struct AnyLoop {
  template <class At>
  void operator()(index_t, At) const {}
};

// Work that consists of independent runs of elements.
//
// `row(r)` does all index arithmetic of run r (divisions, table look-ups), once. `each(run, loop)`
// then picks the access pattern (contiguous words, strided, ...), also once per run, and calls
// `loop(count, at)` for each piece of the run: the launcher determines the order and the lanes of
// the calls `at(j)`, 0 <= j < count; `at` is pure addressing by strides. The calls for one run, and
// the calls for different rows, must be independent of each other.
//
// Measured on a D face of a 16 x 128^3 float tensor: 39.5 GB/s with bodies of this form, 0.84 GB/s
// with one call and its div/mod per element.
template <class Body>
concept RunBody = requires(const Body body, index_t r) {
  { body.rows() } -> std::convertible_to<index_t>;
  body.each(body.row(r), AnyLoop{});
};

// The work on an element in two halves: `read(j)` loads, `write(j, value)` computes and stores. A
// device does not issue a load before an earlier store, which may be to the same address; from a
// Move, LaneLoop reads several elements before it writes the first.
template <class Read, class Write>
struct Move {
  Read read;
  Write write;

  PYDIST_HD void operator()(index_t j) const { write(j, read(j)); }
};
template <class Read, class Write>
Move(Read, Write) -> Move<Read, Write>;

template <class At>
concept TakenApart = requires(const At at, index_t j) { at.write(j, at.read(j)); };

// A launcher's loop may offer to copy a contiguous run in one call (memcpy on the CPU).
template <class Loop>
concept BulkLoop = requires(const Loop loop, char* to, const char* from, index_t bytes) {
  loop.copy(to, from, bytes);
};

}  // namespace pydist::launch
