// Hooks of what asks about a path and changes nothing: permissions, links, file systems,
// attributes.
#include <fcntl.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "preload/descriptors.hpp"
#include "preload/hook.hpp"
#include "preload/mount.hpp"
#include "preload/paths.hpp"
#include "preload/profile.hpp"
#include "preload/status.hpp"

namespace pydist::preload {
namespace {

constexpr long kMagic = 0x01021994;  // of tmpfs: a type that programs know
constexpr unsigned kBlock = 4096;
constexpr int kLongestName = 255;

// Whether a packed entry permits an access, as access says it.
int access_of(const Target& target, int wanted) {
  struct stat status;
  if (!target.is_entry()) return target.fail();
  if (!fill_status(target.entry, status)) return -1;
  unsigned permissions = 0;
  if ((wanted & R_OK) != 0) permissions |= kRead;
  if ((wanted & X_OK) != 0) permissions |= kExecute;
  const bool search = S_ISDIR(status.st_mode) && (permissions & kExecute) != 0;
  if (search) permissions &= ~kExecute;
  if ((wanted & W_OK) != 0) return fail(EROFS);
  const bool may =
      permits(status.st_mode, permissions) && (!search || permits_search(status.st_mode));
  return may ? 0 : fail(EACCES);
}

bool is_packed(int descriptor) { return !Inside::active() && identify(descriptor).is_packed(); }

int fill(struct statfs* status) {
  std::memset(status, 0, sizeof *status);
  status->f_type = kMagic;
  status->f_bsize = status->f_frsize = kBlock;
  status->f_namelen = kLongestName;
  status->f_flags = ST_RDONLY;
  return 0;
}

int fill(struct statvfs* status) {
  std::memset(status, 0, sizeof *status);
  status->f_bsize = status->f_frsize = kBlock;
  status->f_namemax = kLongestName;
  status->f_flag = ST_RDONLY;
  return 0;
}

// readlink says what a link in /proc leads to: the visible path, for a packed entry.
ssize_t visible_link(const char* path, char* text, std::size_t room, ssize_t size) {
  if (size <= 0 || std::strncmp(path, "/proc/", 6) != 0 || !mount().has_packs()) return size;
  char whole[kPathSize];
  const auto length = std::min(static_cast<std::size_t>(size), sizeof whole - 1);
  std::memcpy(whole, text, length);
  whole[length] = 0;
  if (const std::string_view stands_for = below_stand_ins({whole, length}); !stands_for.empty()) {
    if (length == room) return size;  // it can be cut, which a shorter one would hide
    std::memcpy(text, stands_for.data(), stands_for.size());
    return static_cast<ssize_t>(stands_for.size());
  }
  const OpenDescriptor known = identify_name(whole);
  if (!known.is_packed()) return size;
  const std::size_t visible = visible_path(known.entry, whole, sizeof whole);
  std::memcpy(text, whole, std::min(visible, room));
  return static_cast<ssize_t>(std::min(visible, room));
}

}  // namespace

PYDIST_HOOK(int, access, const char* path, int wanted) {
  const Target target(AT_FDCWD, path);
  Call call(CallKind::kAccess, target.counted);
  return call(target.in_pack() ? access_of(target, wanted) : real_access(target.path, wanted));
}

PYDIST_HOOK(int, euidaccess, const char* path, int wanted) {
  const Target target(AT_FDCWD, path);
  Call call(CallKind::kAccess, target.counted);
  return call(target.in_pack() ? access_of(target, wanted) : real_euidaccess(target.path, wanted));
}
PYDIST_ALIAS(eaccess, euidaccess);

PYDIST_HOOK(int, faccessat, int directory, const char* path, int wanted, int flags) {
  const Target target(directory, path);
  Call call(CallKind::kAccess, target.counted);
  if (target.in_pack()) return call(access_of(target, wanted));
  return call(real_faccessat(target.directory, target.path, wanted, flags));
}

PYDIST_HOOK(ssize_t, readlinkat, int directory, const char* path, char* text, std::size_t size) {
  const Target target(directory, path);
  Call call(CallKind::kAccess, target.counted);
  if (target.is_entry()) return call(fail(EINVAL));
  if (target.in_pack()) return call(target.fail());
  const ssize_t read = real_readlinkat(target.directory, target.path, text, size);
  return call(visible_link(target.path, text, size, read));
}

PYDIST_HOOK(ssize_t, readlink, const char* path, char* text, std::size_t size) {
  return hook_readlinkat(AT_FDCWD, path, text, size);
}

PYDIST_HOOK(ssize_t, __readlink_chk, const char* path, char* text, std::size_t size,
            std::size_t room) {
  if (size > room) return real___readlink_chk(path, text, size, room);  // ends the program
  return hook_readlinkat(AT_FDCWD, path, text, size);
}

PYDIST_HOOK(ssize_t, __readlinkat_chk, int directory, const char* path, char* text,
            std::size_t size, std::size_t room) {
  if (size > room) return real___readlinkat_chk(directory, path, text, size, room);
  return hook_readlinkat(directory, path, text, size);
}

PYDIST_HOOK(int, statfs, const char* path, struct statfs* status) {
  const Target target(AT_FDCWD, path);
  if (target.is_entry()) return fill(status);
  return target.in_pack() ? target.fail() : real_statfs(target.path, status);
}
PYDIST_ALIAS(statfs64, statfs);

PYDIST_HOOK(int, fstatfs, int descriptor, struct statfs* status) {
  return is_packed(descriptor) ? fill(status) : real_fstatfs(descriptor, status);
}
PYDIST_ALIAS(fstatfs64, fstatfs);

PYDIST_HOOK(int, statvfs, const char* path, struct statvfs* status) {
  const Target target(AT_FDCWD, path);
  if (target.is_entry()) return fill(status);
  return target.in_pack() ? target.fail() : real_statvfs(target.path, status);
}
PYDIST_ALIAS(statvfs64, statvfs);

PYDIST_HOOK(int, fstatvfs, int descriptor, struct statvfs* status) {
  return is_packed(descriptor) ? fill(status) : real_fstatvfs(descriptor, status);
}
PYDIST_ALIAS(fstatvfs64, fstatvfs);

PYDIST_HOOK(long, pathconf, const char* path, int name) {
  const Target target(AT_FDCWD, path);
  if (target.is_entry()) return real_pathconf("/", name);
  return target.in_pack() ? target.fail() : real_pathconf(target.path, name);
}

// Packed entries have no extended attributes.
#define PYDIST_ATTRIBUTE_HOOKS(get, list)                                                     \
  PYDIST_HOOK(ssize_t, get, const char* path, const char* name, void* value, std::size_t n) { \
    const Target target(AT_FDCWD, path);                                                      \
    if (target.is_entry()) return fail(ENODATA);                                              \
    return target.in_pack() ? target.fail() : real_##get(target.path, name, value, n);        \
  }                                                                                           \
  PYDIST_HOOK(ssize_t, list, const char* path, char* names, std::size_t n) {                  \
    const Target target(AT_FDCWD, path);                                                      \
    if (target.is_entry()) return 0;                                                          \
    return target.in_pack() ? target.fail() : real_##list(target.path, names, n);             \
  }
PYDIST_ATTRIBUTE_HOOKS(getxattr, listxattr)
PYDIST_ATTRIBUTE_HOOKS(lgetxattr, llistxattr)

PYDIST_HOOK(ssize_t, fgetxattr, int descriptor, const char* name, void* value, std::size_t size) {
  return is_packed(descriptor) ? fail(ENODATA) : real_fgetxattr(descriptor, name, value, size);
}

PYDIST_HOOK(ssize_t, flistxattr, int descriptor, char* names, std::size_t size) {
  return is_packed(descriptor) ? 0 : real_flistxattr(descriptor, names, size);
}

}  // namespace pydist::preload
