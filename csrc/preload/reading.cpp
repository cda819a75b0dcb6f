// Hooks of what reads: files in place get their bytes from the partition. The kernel is asked
// first, and refuses to read what is open for writing only, so other files cost nothing.
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>

#include "preload/hook.hpp"
#include "preload/in_place.hpp"
#include "preload/mount.hpp"
#include "preload/profile.hpp"

namespace pydist::preload {
namespace {

ssize_t read_pieces(OpenDescriptor known, const iovec* pieces, int count, off_t offset) {
  ssize_t done = 0;
  for (int i = 0; i < count; ++i) {
    const ssize_t got = read_in_place(known, pieces[i].iov_base, pieces[i].iov_len, offset + done);
    if (got < 0) return done > 0 ? done : -1;
    done += got;
    if (static_cast<std::size_t>(got) < pieces[i].iov_len) break;
  }
  return done;
}

}  // namespace

PYDIST_HOOK(ssize_t, read, int descriptor, void* bytes, std::size_t size) {
  return on_descriptor(CallKind::kRead, descriptor, [&] {
    OpenDescriptor known;
    const ssize_t got = real_read(descriptor, bytes, size);
    if (!is_in_place(got, EBADF, descriptor, known)) [[likely]]
      return got;
    return at_position(descriptor,
                       [&](off_t offset) { return read_in_place(known, bytes, size, offset); });
  });
}

PYDIST_HOOK(ssize_t, __read_chk, int descriptor, void* bytes, std::size_t size, std::size_t room) {
  if (size > room) return real___read_chk(descriptor, bytes, size, room);  // ends the program
  return hook_read(descriptor, bytes, size);
}

PYDIST_HOOK(ssize_t, pread, int descriptor, void* bytes, std::size_t size, off_t offset) {
  return on_descriptor(CallKind::kRead, descriptor, [&] {
    OpenDescriptor known;
    const ssize_t got = real_pread(descriptor, bytes, size, offset);
    if (!is_in_place(got, EBADF, descriptor, known)) [[likely]]
      return got;
    return read_in_place(known, bytes, size, offset);
  });
}
PYDIST_ALIAS(pread64, pread);

PYDIST_HOOK(ssize_t, __pread_chk, int descriptor, void* bytes, std::size_t size, off_t offset,
            std::size_t room) {
  if (size > room) return real___pread_chk(descriptor, bytes, size, offset, room);
  return hook_pread(descriptor, bytes, size, offset);
}
PYDIST_ALIAS(__pread64_chk, __pread_chk);

PYDIST_HOOK(ssize_t, readv, int descriptor, const iovec* pieces, int count) {
  return on_descriptor(CallKind::kRead, descriptor, [&] {
    OpenDescriptor known;
    const ssize_t got = real_readv(descriptor, pieces, count);
    if (!is_in_place(got, EBADF, descriptor, known)) [[likely]]
      return got;
    return at_position(descriptor,
                       [&](off_t offset) { return read_pieces(known, pieces, count, offset); });
  });
}

PYDIST_HOOK(ssize_t, preadv, int descriptor, const iovec* pieces, int count, off_t offset) {
  return on_descriptor(CallKind::kRead, descriptor, [&] {
    OpenDescriptor known;
    const ssize_t got = real_preadv(descriptor, pieces, count, offset);
    if (!is_in_place(got, EBADF, descriptor, known)) [[likely]]
      return got;
    return read_pieces(known, pieces, count, offset);
  });
}
PYDIST_ALIAS(preadv64, preadv);

PYDIST_HOOK(ssize_t, preadv2, int descriptor, const iovec* pieces, int count, off_t offset,
            int flags) {
  return on_descriptor(CallKind::kRead, descriptor, [&] {
    OpenDescriptor known;
    const ssize_t got = real_preadv2(descriptor, pieces, count, offset, flags);
    if (!is_in_place(got, EBADF, descriptor, known)) [[likely]]
      return got;
    if (offset != -1) return read_pieces(known, pieces, count, offset);
    return at_position(descriptor,
                       [&](off_t from) { return read_pieces(known, pieces, count, from); });
  });
}
PYDIST_ALIAS(preadv64v2, preadv2);

// The memfd of a file in place is one hole for the kernel, and the file has none.
PYDIST_HOOK(off_t, lseek, int descriptor, off_t offset, int from) {
  Call call(CallKind::kSeek, tracked(descriptor));
  if (from == SEEK_DATA || from == SEEK_HOLE) [[unlikely]] {
    const OpenDescriptor known = identify(descriptor);
    if (known.held == Held::kInPlace) {
      const off_t size =
          attempt(off_t{-1}, [&] { return static_cast<off_t>(pack().file(known.entry).raw_size); });
      if (size < 0) return call(off_t{-1});
      if (offset < 0 || offset >= size) return call(off_t{fail(ENXIO)});
      return call(real_lseek(descriptor, from == SEEK_DATA ? offset : size, SEEK_SET));
    }
  }
  return call(real_lseek(descriptor, offset, from));
}
PYDIST_ALIAS(lseek64, lseek);

// A program that asks how a descriptor is open, or locks a part of what no process writes.
PYDIST_HOOK(int, fcntl, int descriptor, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void* argument = va_arg(arguments, void*);  // an int or a pointer; garbage where there is none
  va_end(arguments);
  const int result = real_fcntl(descriptor, command, argument);
  OpenDescriptor known;
  if (command == F_GETFL && result >= 0 && (result & O_ACCMODE) == O_WRONLY) {
    const bool in_place = identify(descriptor).held == Held::kInPlace;
    return in_place ? (result & ~O_ACCMODE) | O_RDONLY : result;
  }
  const bool locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK ||
                     command == F_OFD_SETLKW;
  if (locks && is_in_place(result, EBADF, descriptor, known)) {
    if (static_cast<const struct flock*>(argument)->l_type == F_RDLCK) return 0;
    errno = EBADF;
  }
  if (command == F_DUPFD || command == F_DUPFD_CLOEXEC) track(result, tracked(descriptor));
  return result;
}
PYDIST_ALIAS(fcntl64, fcntl);

}  // namespace pydist::preload
