// Opens packed files as the kernel opens files of a read-only file system.
#include "preload/open.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <string_view>

#include "preload/cache.hpp"
#include "preload/descriptors.hpp"
#include "preload/hook.hpp"
#include "preload/mount.hpp"
#include "preload/profile.hpp"

namespace pydist::preload {
namespace {

bool writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0; }

// Why a packed file or directory can't be opened, or 0.
int refusal(const packs::Entry& entry, int flags) {
  const bool directory = entry.kind == packs::EntryKind::kDirectory;
  if ((flags & O_PATH) != 0) return directory || (flags & O_DIRECTORY) == 0 ? 0 : ENOTDIR;
  if ((flags & O_CREAT) != 0 && (flags & O_EXCL) != 0) return EEXIST;
  if ((flags & O_TMPFILE) == O_TMPFILE) return directory ? EROFS : ENOTDIR;
  if (directory && (writes(flags) || (flags & O_CREAT) != 0)) return EISDIR;
  if (!directory && (flags & O_DIRECTORY) != 0) return ENOTDIR;
  if (writes(flags)) return EROFS;
  return permits(entry.mode, kRead) ? 0 : EACCES;
}

int open_entry(std::uint32_t i, int flags, bool whole) {
  const packs::Entry* entry =
      attempt(static_cast<const packs::Entry*>(nullptr), [&] { return &pack().index().entry(i); });
  if (entry == nullptr) return -1;
  if (const int error = refusal(*entry, flags); error != 0) return fail(error);
  if (entry->kind == packs::EntryKind::kDirectory) return open_directory(i, flags);
  if ((flags & O_PATH) != 0) return open_path_only(i, flags);
  const bool large = entry->codec == packs::Codec::kRaw && entry->raw_size > mount().large;
  if (large && !whole) return open_in_place(i, flags);
  // Programs are started from memory alone: the cache's file system may not permit it.
  const bool program = whole || (entry->mode & 0111) != 0;
  const int cached = program ? -1 : open_cached(i, flags);
  return cached >= 0 ? cached : open_copy(i, flags);
}

int open_packed(const Target& target, int flags, bool whole) {
  const bool creates = target.reached && (flags & O_CREAT) != 0;
  if (creates && target.slash) return fail(EISDIR);
  if (creates && target.error == ENOENT) return fail(EROFS);
  return target.is_entry() ? open_entry(target.entry, flags, whole) : target.fail();
}

}  // namespace

PYDIST_HOOK(int, openat, int directory, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const bool creates = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  const mode_t mode = creates ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return open_path(directory, path, flags, mode);
}
PYDIST_ALIAS(openat64, openat);

PYDIST_HOOK(int, open, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const bool creates = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  const mode_t mode = creates ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return open_path(AT_FDCWD, path, flags, mode);
}
PYDIST_ALIAS(open64, open);

// The forms of programs that were compiled with _FORTIFY_SOURCE.
PYDIST_HOOK(int, __open_2, const char* path, int flags) {
  return open_path(AT_FDCWD, path, flags, 0);
}
PYDIST_ALIAS(__open64_2, __open_2);

PYDIST_HOOK(int, __openat_2, int directory, const char* path, int flags) {
  return open_path(directory, path, flags, 0);
}
PYDIST_ALIAS(__openat64_2, __openat_2);

PYDIST_HOOK(int, creat, const char* path, mode_t mode) {
  return open_path(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}
PYDIST_ALIAS(creat64, creat);

int open_path(int directory, const char* path, int flags, mode_t mode) {
  if (Inside::active()) {
    const int opened = real_openat(directory, path, flags, mode);
    const std::string_view packs = mount().packs;
    const bool of_pack = !packs.empty() && std::string_view(path).substr(0, packs.size()) == packs;
    return of_pack ? keep_own(opened) : opened;
  }
  const Target target(directory, path);
  const auto make = [&] { return open_target(target, flags, mode); };
  return target.counted && profiling() ? count_call(CallKind::kOpen, make) : make();
}

namespace {

// What was opened by a link to a descriptor is what the descriptor is. The kernel refuses to open a
// file in place for reading, unless root does it.
int follow(int opened, const Target& target, int flags) {
  const int error = errno;
  const bool refused = opened < 0 && error == EACCES;
  const int looked_at =
      refused ? real_openat(target.directory, target.path, O_PATH | O_CLOEXEC) : opened;
  const OpenDescriptor known = identify(looked_at);
  const bool kept = !known.is_packed() || (known.held == Held::kCopy && !writes(flags));
  if (looked_at >= 0 && (refused || !kept)) syscall(SYS_close, looked_at);
  errno = error;
  return kept ? opened : open_entry(known.entry, flags & ~O_CREAT, false);
}

}  // namespace

int open_target(const Target& target, int flags, mode_t mode) {
  int opened;
  if (target.in_pack()) {
    opened = open_packed(target, flags, false);
  } else {
    opened = real_openat(target.directory, target.path, flags, mode);
    if (mount().has_packs() && can_be_link(target.path)) opened = follow(opened, target, flags);
  }
  if (opened >= 0 && profiling()) {
    track(opened, target.counted);
    struct stat status;
    if (target.counted && ::fstat(opened, &status) == 0 && S_ISREG(status.st_mode))
      count_file(status);
  }
  return opened;
}

bool can_be_link(const char* path) {
  const std::string_view text(path);
  return text.substr(0, 6) == "/proc/" || text.substr(0, 5) == "/dev/";
}

int open_whole(const Target& target, int flags) { return open_packed(target, flags, true); }

}  // namespace pydist::preload
