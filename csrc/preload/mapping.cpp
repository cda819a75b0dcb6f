// Hooks of what maps files, or moves their bytes within the kernel, for files in place.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "preload/hook.hpp"
#include "preload/in_place.hpp"
#include "preload/mount.hpp"
#include "preload/profile.hpp"

namespace pydist::preload {
namespace {

struct Range {
  int partition;        // its descriptor; -1 if it is on another node
  std::uint64_t start;  // of the file in its partition
  std::uint64_t size;   // of the file
};

bool find_range(OpenDescriptor known, Range& range) {
  return attempt(false, [&] {
    const packs::Entry& entry = pack().file(known.entry);
    const bool here = pack().is_here(entry.partition);
    range = {here ? pack().partition_fd(entry.partition) : -1, entry.offset, entry.raw_size};
    return true;
  });
}

// Moves bytes at `offset` of a file: move(partition, position, size) returns their number.
template <class Function>
ssize_t move_range(OpenDescriptor known, off_t offset, std::size_t size, Function move) {
  Range range;
  if (!find_range(known, range)) return -1;
  if (offset < 0 || range.partition < 0) return fail(EINVAL);  // then programs read and write
  const auto from = static_cast<std::uint64_t>(offset);
  if (from >= range.size) return 0;
  auto position = static_cast<off64_t>(range.start + from);
  return move(range.partition, &position, std::min<std::uint64_t>(size, range.size - from));
}

// The same, at an offset that the caller holds, or at the descriptor's position. As in the kernel,
// no other thread waits meanwhile: the receiver can be full until one of them reads. So two threads
// that move one position at the same time can move the same bytes.
template <class Function>
ssize_t move_from(int descriptor, OpenDescriptor known, off64_t* offset, std::size_t size,
                  Function move) {
  const off64_t from = offset == nullptr ? position_of(descriptor) : *offset;
  if (offset == nullptr && from < 0) return -1;
  const ssize_t moved = move_range(known, from, size, move);
  if (moved <= 0) return moved;
  if (offset == nullptr) {
    set_position(descriptor, from + moved);
  } else {
    *offset = from + moved;
  }
  return moved;
}

}  // namespace

// Pages of a file whose start in the partition is on a page's border are the partition's own;
// others, and the page in which a file ends, are those of a copy: MADV_DONTNEED, by which programs
// give memory back, would leave zeros in pages without a file.
PYDIST_HOOK(void*, mmap, void* address, std::size_t size, int protection, int flags, int descriptor,
            off_t offset) {
  Call call(CallKind::kMap, descriptor >= 0 && tracked(descriptor));
  void* mapped = real_mmap(address, size, protection, flags, descriptor, offset);
  const auto passed = [&](void* result) {
    call(result == MAP_FAILED ? -1 : 0);
    return result;
  };
  OpenDescriptor known;
  if (mapped != MAP_FAILED || !is_in_place(-1, EACCES, descriptor, known)) [[likely]]
    return passed(mapped);
  Range range;
  const int kept = flags & (MAP_FIXED | MAP_FIXED_NOREPLACE);
  if ((flags & MAP_TYPE) != MAP_PRIVATE && (protection & PROT_WRITE) != 0) return passed(mapped);
  if (!find_range(known, range)) return passed(MAP_FAILED);
  // What is beyond the end of the file stays inaccessible.
  mapped = real_mmap(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | kept,
                     -1, 0);
  const auto from = static_cast<std::uint64_t>(offset);
  if (mapped == MAP_FAILED || from >= range.size) return passed(mapped);
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::uint64_t used = std::min<std::uint64_t>(size, range.size - from);
  const std::uint64_t shared =
      range.partition >= 0 && range.start % page == 0 ? used - used % page : 0;
  const auto map = [&](std::uint64_t at, std::uint64_t length, int file, std::uint64_t position) {
    return real_mmap(static_cast<char*>(mapped) + at, length, protection,
                     (flags & ~MAP_FIXED_NOREPLACE) | MAP_FIXED, file,
                     static_cast<off_t>(position)) != MAP_FAILED;
  };
  bool made = shared == 0 || map(0, shared, range.partition, range.start + from);
  if (made && shared < used) {
    const int copy = open_part(known.entry, from + shared, used - shared);
    made = copy >= 0 && map(shared, used - shared, copy, 0);
    if (copy >= 0) syscall(SYS_close, copy);
  }
  if (made) return passed(mapped);
  const int error = errno;
  munmap(mapped, size);
  errno = error;
  return passed(MAP_FAILED);
}
PYDIST_ALIAS(mmap64, mmap);

PYDIST_HOOK(ssize_t, sendfile, int out, int in, off64_t* offset, std::size_t size) {
  Call call(CallKind::kRead, tracked(in));
  OpenDescriptor known;
  const ssize_t sent = real_sendfile(out, in, offset, size);
  if (!is_in_place(sent, EBADF, in, known)) return call.moved(sent);
  return call.moved(move_from(in, known, offset, size, [&](int from, off64_t* at, std::size_t n) {
    return real_sendfile(out, from, at, n);
  }));
}
PYDIST_ALIAS(sendfile64, sendfile);

PYDIST_HOOK(ssize_t, copy_file_range, int in, off64_t* offset, int out, off64_t* out_offset,
            std::size_t size, unsigned flags) {
  Call call(CallKind::kRead, tracked(in));
  OpenDescriptor known;
  const ssize_t copied = real_copy_file_range(in, offset, out, out_offset, size, flags);
  if (!is_in_place(copied, EBADF, in, known)) return call.moved(copied);
  return call.moved(move_from(in, known, offset, size, [&](int from, off64_t* at, std::size_t n) {
    return real_copy_file_range(from, at, out, out_offset, n, flags);
  }));
}

PYDIST_HOOK(ssize_t, splice, int in, off64_t* offset, int out, off64_t* out_offset,
            std::size_t size, unsigned flags) {
  Call call(CallKind::kRead, tracked(in));
  OpenDescriptor known;
  const ssize_t moved = real_splice(in, offset, out, out_offset, size, flags);
  if (!is_in_place(moved, EBADF, in, known)) return call.moved(moved);
  return call.moved(move_from(in, known, offset, size, [&](int from, off64_t* at, std::size_t n) {
    return real_splice(from, at, out, out_offset, n, flags);
  }));
}

}  // namespace pydist::preload
