// Hooks of what changes files: it goes through in the output folder, and the pack is a read-only
// file system.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "preload/hook.hpp"
#include "preload/paths.hpp"
#include "preload/profile.hpp"

namespace pydist::preload {
namespace {

constinit Real<int(int, const char*, int, int)> real_faccessat{"faccessat"};

using Place = Target::Place;

// The kernel's answers on a read-only file system, in its order of checks.
int refuse_creation(const Target& at, bool directory) {
  if (at.is_entry() || (at.reached && at.error == ENOTDIR)) return fail(EEXIST);
  const bool could = at.place == Place::kMissing && at.error == ENOENT && (directory || !at.slash);
  return could ? fail(EROFS) : at.fail();
}

using Last = Target::Last;

int refuse_removal(const Target& at, int flags) {
  if (!at.reached) return at.fail();
  const bool directory = (flags & AT_REMOVEDIR) != 0;
  if (at.last != Last::kName && !directory) return fail(EISDIR);
  switch (at.last) {
    case Last::kDot:
      return fail(EINVAL);
    case Last::kDotDot:
      return fail(ENOTEMPTY);
    case Last::kMountPoint:
      return fail(EBUSY);
    default:
      return fail(EROFS);
  }
}

// For two paths where at least one is packed.
int refuse_renaming(const Target& from, const Target& to) {
  for (const Target* at : {&from, &to}) {
    if (at->in_pack() ? !at->reached : *at->path == 0)
      return fail(at->in_pack() ? at->error : ENOENT);
  }
  if (!from.in_pack() || !to.in_pack()) return fail(EXDEV);
  return fail(from.last != Last::kName || to.last != Last::kName ? EBUSY : EROFS);
}

int refuse_link(const Target& from, const Target& to) {
  if (from.in_pack() && !from.is_entry()) return from.fail();
  if (!from.in_pack() && real_faccessat(from.directory, from.path, F_OK, AT_SYMLINK_NOFOLLOW) != 0)
    return -1;
  if (to.in_pack()) return refuse_creation(to, false);
  return fail(*to.path == 0 ? ENOENT : EXDEV);
}

// A template of mkstemp below the output folder is filled in where the file is made.
template <class Function>
int make_temporary(char* pattern, std::size_t suffix, Function make) {
  const Target target(AT_FDCWD, pattern);
  Call call(CallKind::kOpen, target.counted);
  if (target.in_pack()) return call(refuse_creation(target, false));
  if (target.path == pattern) return call(make(pattern));
  char path[kPathSize];
  std::snprintf(path, sizeof path, "%s", target.path);
  const int made = make(path);
  constexpr std::size_t kFilled = 6;
  const std::size_t end = std::strlen(path), mine = std::strlen(pattern);
  if (made >= 0 && end >= kFilled + suffix && mine >= kFilled + suffix)
    std::memcpy(pattern + mine - suffix - kFilled, path + end - suffix - kFilled, kFilled);
  return call(made);
}

}  // namespace

PYDIST_HOOK(int, mkdirat, int directory, const char* path, mode_t mode) {
  const Target at(directory, path);
  Call call(CallKind::kChange, at.counted);
  return call(at.in_pack() ? refuse_creation(at, true) : real_mkdirat(at.directory, at.path, mode));
}

PYDIST_HOOK(int, mkdir, const char* path, mode_t mode) {
  return hook_mkdirat(AT_FDCWD, path, mode);
}

PYDIST_HOOK(int, mknodat, int directory, const char* path, mode_t mode, dev_t device) {
  const Target at(directory, path);
  Call call(CallKind::kChange, at.counted);
  if (at.in_pack()) return call(refuse_creation(at, false));
  return call(real_mknodat(at.directory, at.path, mode, device));
}

PYDIST_HOOK(int, mknod, const char* path, mode_t mode, dev_t device) {
  return hook_mknodat(AT_FDCWD, path, mode, device);
}

PYDIST_HOOK(int, mkfifoat, int directory, const char* path, mode_t mode) {
  return hook_mknodat(directory, path, mode | S_IFIFO, 0);
}

PYDIST_HOOK(int, mkfifo, const char* path, mode_t mode) {
  return hook_mknodat(AT_FDCWD, path, mode | S_IFIFO, 0);
}

PYDIST_HOOK(int, symlinkat, const char* text, int directory, const char* path) {
  const Target at(directory, path);
  Call call(CallKind::kChange, at.counted);
  return call(at.in_pack() ? refuse_creation(at, false)
                           : real_symlinkat(text, at.directory, at.path));
}

PYDIST_HOOK(int, symlink, const char* text, const char* path) {
  return hook_symlinkat(text, AT_FDCWD, path);
}

PYDIST_HOOK(int, linkat, int from_directory, const char* from_path, int to_directory,
            const char* to_path, int flags) {
  const Target from(from_directory, from_path), to(to_directory, to_path);
  Call call(CallKind::kChange, from.counted || to.counted);
  if (from.in_pack() || to.in_pack()) return call(refuse_link(from, to));
  return call(real_linkat(from.directory, from.path, to.directory, to.path, flags));
}

PYDIST_HOOK(int, link, const char* from, const char* to) {
  return hook_linkat(AT_FDCWD, from, AT_FDCWD, to, 0);
}

PYDIST_HOOK(int, unlinkat, int directory, const char* path, int flags) {
  const Target at(directory, path);
  Call call(CallKind::kChange, at.counted);
  return call(at.in_pack() ? refuse_removal(at, flags)
                           : real_unlinkat(at.directory, at.path, flags));
}

PYDIST_HOOK(int, unlink, const char* path) { return hook_unlinkat(AT_FDCWD, path, 0); }

PYDIST_HOOK(int, rmdir, const char* path) { return hook_unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

PYDIST_HOOK(int, remove, const char* path) {
  const Target at(AT_FDCWD, path);
  Call call(CallKind::kChange, at.counted);
  if (!at.in_pack()) return call(real_remove(at.path));
  refuse_removal(at, 0);  // then as a directory, as the C library does
  return call(errno == EISDIR ? refuse_removal(at, AT_REMOVEDIR) : -1);
}

PYDIST_HOOK(int, renameat, int from_directory, const char* from_path, int to_directory,
            const char* to_path) {
  const Target from(from_directory, from_path), to(to_directory, to_path);
  Call call(CallKind::kChange, from.counted || to.counted);
  if (from.in_pack() || to.in_pack()) return call(refuse_renaming(from, to));
  return call(real_renameat(from.directory, from.path, to.directory, to.path));
}

PYDIST_HOOK(int, rename, const char* from, const char* to) {
  return hook_renameat(AT_FDCWD, from, AT_FDCWD, to);
}

PYDIST_HOOK(int, renameat2, int from_directory, const char* from_path, int to_directory,
            const char* to_path, unsigned flags) {
  const Target from(from_directory, from_path), to(to_directory, to_path);
  Call call(CallKind::kChange, from.counted || to.counted);
  if (from.in_pack() || to.in_pack()) return call(refuse_renaming(from, to));
  return call(real_renameat2(from.directory, from.path, to.directory, to.path, flags));
}

PYDIST_HOOK(int, mkstemp, char* pattern) {
  return make_temporary(pattern, 0, [](char* path) { return real_mkstemp(path); });
}
PYDIST_ALIAS(mkstemp64, mkstemp);

PYDIST_HOOK(int, mkostemp, char* pattern, int flags) {
  return make_temporary(pattern, 0, [&](char* path) { return real_mkostemp(path, flags); });
}
PYDIST_ALIAS(mkostemp64, mkostemp);

PYDIST_HOOK(int, mkstemps, char* pattern, int suffix) {
  return make_temporary(pattern, static_cast<std::size_t>(suffix),
                        [&](char* path) { return real_mkstemps(path, suffix); });
}
PYDIST_ALIAS(mkstemps64, mkstemps);

PYDIST_HOOK(int, mkostemps, char* pattern, int suffix, int flags) {
  return make_temporary(pattern, static_cast<std::size_t>(suffix),
                        [&](char* path) { return real_mkostemps(path, suffix, flags); });
}
PYDIST_ALIAS(mkostemps64, mkostemps);

PYDIST_HOOK(char*, mkdtemp, char* pattern) {
  const int made =
      make_temporary(pattern, 0, [](char* path) { return real_mkdtemp(path) == nullptr ? -1 : 0; });
  return made < 0 ? nullptr : pattern;
}

}  // namespace pydist::preload
