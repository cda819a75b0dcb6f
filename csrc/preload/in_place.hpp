// Bytes and positions of files in place: large files that are read from their partition.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>

#include "preload/descriptors.hpp"

namespace pydist::preload {

// Whether a call failed with `error` because its descriptor is of a file in place, which is then
// identified. result: of the call; errno: as the call left it. A call that did not fail, or with
// another error, costs a comparison. For a packed directory, errno EBADF becomes EISDIR, which a
// read of a directory fails with.
bool is_in_place(ssize_t result, int error, int descriptor, OpenDescriptor& known);

// Reads as pread does: returns the number of bytes, fewer than `size` only at the end of the file
// or for a `size` above 2 GiB, else -1 with errno. Bytes come from the partition or a server, and
// are not compared with the file's checksum.
ssize_t read_in_place(OpenDescriptor known, void* bytes, std::size_t size, off_t offset);

// One thread at a time moves the position of a descriptor, as the kernel has it. Waits while
// another one does; descriptors share 64 flags. In the child of a fork no thread holds one. Not for
// nested use: two descriptors of one thread could share a flag.
class Moving {
 public:
  explicit Moving(int descriptor);
  ~Moving();
  Moving(const Moving&) = delete;
  Moving& operator=(const Moving&) = delete;

 private:
  std::atomic_flag& moved_;
};

// The position of a descriptor, in bytes from the start of its file, as the kernel has it for the
// memfd: it is shared with duplicates and with other processes. -1 with errno if there is none.
off_t position_of(int descriptor);
void set_position(int descriptor, off_t position);

// Calls `move(offset)` at the position of a descriptor, and advances it by the result, a number of
// bytes; a result of -1 leaves it. `move` must not wait for what another thread does.
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
