// Bytes and positions of files in place: large files that are read from their partition.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>

#include "preload/descriptors.hpp"

namespace pydist::preload {

// Whether a call failed with `error` because its descriptor is of a file in place, which is then
// identified.
bool is_in_place(ssize_t result, int error, int descriptor, Descriptor& known);

// Reads as pread does.
ssize_t read_in_place(Descriptor known, void* bytes, std::size_t size, off_t offset);

// One thread at a time moves the position of a descriptor, as the kernel has it. The child of a
// fork begins anew.
class Moving {
 public:
  explicit Moving(int descriptor);
  ~Moving();
  Moving(const Moving&) = delete;
  Moving& operator=(const Moving&) = delete;

 private:
  std::atomic_flag& moved_;
};

off_t position_of(int descriptor);
void set_position(int descriptor, off_t position);

// Calls `move(offset)` at the position of a descriptor, and advances it by what that returns.
template <class Function>
[[gnu::noinline]] ssize_t at_position(int descriptor, Function move) {
  const Moving one_at_a_time(descriptor);
  const off_t position = position_of(descriptor);
  if (position < 0) return -1;
  const ssize_t moved = move(position);
  if (moved > 0) set_position(descriptor, position + moved);
  return moved;
}

}  // namespace pydist::preload
