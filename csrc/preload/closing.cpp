// Hooks of what writes to and closes descriptors: the library's own stay open, and calls are
// counted.
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

#include "preload/descriptors.hpp"
#include "preload/hook.hpp"
#include "preload/in_place.hpp"
#include "preload/mount.hpp"
#include "preload/profile.hpp"

namespace pydist::preload {
namespace {

constexpr int kMostOwn = 1 << 16;

// The memfd of a file in place refuses writes for another reason than a file that is open for
// reading.
ssize_t written(ssize_t result, int descriptor) {
  OpenDescriptor known;
  if (is_in_place(result, EPERM, descriptor, known)) errno = EBADF;
  return result;
}

}  // namespace

PYDIST_HOOK(ssize_t, write, int descriptor, const void* bytes, std::size_t size) {
  return on_descriptor(CallKind::kWrite, descriptor,
                       [&] { return written(real_write(descriptor, bytes, size), descriptor); });
}

PYDIST_HOOK(ssize_t, pwrite, int descriptor, const void* bytes, std::size_t size, off_t offset) {
  return on_descriptor(CallKind::kWrite, descriptor, [&] {
    return written(real_pwrite(descriptor, bytes, size, offset), descriptor);
  });
}
PYDIST_ALIAS(pwrite64, pwrite);

PYDIST_HOOK(ssize_t, writev, int descriptor, const iovec* pieces, int count) {
  return on_descriptor(CallKind::kWrite, descriptor,
                       [&] { return written(real_writev(descriptor, pieces, count), descriptor); });
}

PYDIST_HOOK(ssize_t, pwritev, int descriptor, const iovec* pieces, int count, off_t offset) {
  return on_descriptor(CallKind::kWrite, descriptor, [&] {
    return written(real_pwritev(descriptor, pieces, count, offset), descriptor);
  });
}
PYDIST_ALIAS(pwritev64, pwritev);

PYDIST_HOOK(int, close, int descriptor) {
  if (is_own(descriptor)) [[unlikely]] {
    if (!Inside::active()) return fail(EBADF);
    release_own(descriptor);
  }
  const bool counted = tracked(descriptor);
  track(descriptor, false);
  const auto make = [&] { return real_close(descriptor); };
  return counted ? count_call(CallKind::kClose, make) : make();
}

// Sockets to servers of packs are the library's own, too.
PYDIST_HOOK(int, socket, int domain, int type, int protocol) {
  const int made = real_socket(domain, type, protocol);
  return Inside::active() && mount().has_packs() ? keep_own(made) : made;
}

PYDIST_HOOK(int, close_range, unsigned first, unsigned last, int flags) {
  int result = 0;
  for (unsigned own = first; own <= last && own < kMostOwn; ++own) {
    if (!is_own(static_cast<int>(own))) continue;
    if (own > first) result = real_close_range(first, own - 1, flags);
    if (result != 0 || own == last) return result;
    first = own + 1;
  }
  return real_close_range(first, last, flags);
}

PYDIST_HOOK(void, closefrom, int first) {
  if (hook_close_range(static_cast<unsigned>(first < 0 ? 0 : first), UINT_MAX, 0) == 0) return;
  for (int i = first < 0 ? 0 : first; i < kMostOwn; ++i) hook_close(i);
}

PYDIST_HOOK(int, dup, int descriptor) {
  const int made = real_dup(descriptor);
  track(made, tracked(descriptor));
  return made;
}

PYDIST_HOOK(int, dup2, int descriptor, int wanted) {
  if (is_own(wanted)) return fail(EBUSY);
  const int made = real_dup2(descriptor, wanted);
  track(made, tracked(descriptor));
  return made;
}

PYDIST_HOOK(int, dup3, int descriptor, int wanted, int flags) {
  if (is_own(wanted)) return fail(EBUSY);
  const int made = real_dup3(descriptor, wanted, flags);
  track(made, tracked(descriptor));
  return made;
}

}  // namespace pydist::preload
