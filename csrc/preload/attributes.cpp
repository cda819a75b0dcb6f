// Hooks of what changes attributes and sizes of files: it goes through in the output folder, and
// the pack is a read-only file system.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>
#include <utime.h>

#include <cerrno>
#include <cstddef>

#include "preload/descriptors.hpp"
#include "preload/hook.hpp"
#include "preload/mount.hpp"
#include "preload/paths.hpp"
#include "preload/profile.hpp"

namespace pydist::preload {
namespace {

// Calls change(directory, path) unless the path is packed.
template <class Function>
int change(int directory, const char* path, Function change_it) {
  const Target at(directory, path);
  Call call(CallKind::kChange, at.counted);
  if (!at.in_pack()) return call(change_it(at.directory, at.path));
  return call(at.is_entry() ? fail(EROFS) : at.fail());
}

// Calls change() unless the descriptor is of a packed file or directory.
template <class Function>
int change(int descriptor, Function change_it) {
  Call call(CallKind::kChange, tracked(descriptor));
  const OpenDescriptor known = Inside::active() ? OpenDescriptor{} : identify(descriptor);
  const bool packed = known.is_packed() && known.held != Held::kPathOnly;
  return call(packed ? fail(EROFS) : change_it());
}

}  // namespace

PYDIST_HOOK(int, truncate, const char* path, off_t size) {
  const Target at(AT_FDCWD, path);
  Call call(CallKind::kChange, at.counted);
  if (!at.in_pack()) return call(real_truncate(at.path, size));
  if (!at.is_entry()) return call(at.fail());
  const bool directory = attempt(
      false, [&] { return pack().index().entry(at.entry).kind == packs::EntryKind::kDirectory; });
  return call(fail(directory ? EISDIR : EROFS));
}
PYDIST_ALIAS(truncate64, truncate);

PYDIST_HOOK(int, ftruncate, int descriptor, off_t size) {
  Call call(CallKind::kChange, tracked(descriptor));
  const bool in_place = !Inside::active() && identify(descriptor).held == Held::kInPlace;
  return call(in_place ? fail(EINVAL) : real_ftruncate(descriptor, size));
}
PYDIST_ALIAS(ftruncate64, ftruncate);

PYDIST_HOOK(int, chmod, const char* path, mode_t mode) {
  return change(AT_FDCWD, path, [&](int, const char* at) { return real_chmod(at, mode); });
}

PYDIST_HOOK(int, fchmodat, int directory, const char* path, mode_t mode, int flags) {
  return change(directory, path,
                [&](int from, const char* at) { return real_fchmodat(from, at, mode, flags); });
}

PYDIST_HOOK(int, fchmod, int descriptor, mode_t mode) {
  return change(descriptor, [&] { return real_fchmod(descriptor, mode); });
}

PYDIST_HOOK(int, chown, const char* path, uid_t user, gid_t group) {
  return change(AT_FDCWD, path, [&](int, const char* at) { return real_chown(at, user, group); });
}

PYDIST_HOOK(int, lchown, const char* path, uid_t user, gid_t group) {
  return change(AT_FDCWD, path, [&](int, const char* at) { return real_lchown(at, user, group); });
}

PYDIST_HOOK(int, fchownat, int directory, const char* path, uid_t user, gid_t group, int flags) {
  if (path != nullptr && *path == 0 && (flags & AT_EMPTY_PATH) != 0)
    return change(directory, [&] { return real_fchownat(directory, path, user, group, flags); });
  return change(directory, path, [&](int from, const char* at) {
    return real_fchownat(from, at, user, group, flags);
  });
}

PYDIST_HOOK(int, fchown, int descriptor, uid_t user, gid_t group) {
  return change(descriptor, [&] { return real_fchown(descriptor, user, group); });
}

PYDIST_HOOK(int, utime, const char* path, const utimbuf* times) {
  return change(AT_FDCWD, path, [&](int, const char* at) { return real_utime(at, times); });
}

PYDIST_HOOK(int, utimes, const char* path, const timeval* times) {
  return change(AT_FDCWD, path, [&](int, const char* at) { return real_utimes(at, times); });
}

PYDIST_HOOK(int, lutimes, const char* path, const timeval* times) {
  return change(AT_FDCWD, path, [&](int, const char* at) { return real_lutimes(at, times); });
}

PYDIST_HOOK(int, futimesat, int directory, const char* path, const timeval* times) {
  if (path == nullptr)
    return change(directory, [&] { return real_futimesat(directory, path, times); });
  return change(directory, path,
                [&](int from, const char* at) { return real_futimesat(from, at, times); });
}

PYDIST_HOOK(int, utimensat, int directory, const char* path, const timespec* times, int flags) {
  if (path == nullptr)
    return change(directory, [&] { return real_utimensat(directory, path, times, flags); });
  return change(directory, path,
                [&](int from, const char* at) { return real_utimensat(from, at, times, flags); });
}

PYDIST_HOOK(int, futimens, int descriptor, const timespec* times) {
  return change(descriptor, [&] { return real_futimens(descriptor, times); });
}

PYDIST_HOOK(int, futimes, int descriptor, const timeval* times) {
  return change(descriptor, [&] { return real_futimes(descriptor, times); });
}

PYDIST_HOOK(int, setxattr, const char* path, const char* name, const void* value, std::size_t size,
            int flags) {
  return change(AT_FDCWD, path,
                [&](int, const char* at) { return real_setxattr(at, name, value, size, flags); });
}

PYDIST_HOOK(int, lsetxattr, const char* path, const char* name, const void* value, std::size_t size,
            int flags) {
  return change(AT_FDCWD, path,
                [&](int, const char* at) { return real_lsetxattr(at, name, value, size, flags); });
}

PYDIST_HOOK(int, fsetxattr, int descriptor, const char* name, const void* value, std::size_t size,
            int flags) {
  return change(descriptor, [&] { return real_fsetxattr(descriptor, name, value, size, flags); });
}

PYDIST_HOOK(int, removexattr, const char* path, const char* name) {
  return change(AT_FDCWD, path, [&](int, const char* at) { return real_removexattr(at, name); });
}

PYDIST_HOOK(int, lremovexattr, const char* path, const char* name) {
  return change(AT_FDCWD, path, [&](int, const char* at) { return real_lremovexattr(at, name); });
}

}  // namespace pydist::preload
