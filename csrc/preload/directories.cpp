// Hooks of the current directory and of real paths, and of what the C library does with directories
// by calls of its own: scandir and glob.
#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
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

using Filter = int (*)(const dirent*);
using Order = int (*)(const dirent**, const dirent**);

// Passes a path on as the C library's functions return one: in a buffer of the caller, or a new
// one.
char* give(const char* path, char* buffer, std::size_t room) {
  const std::size_t size = std::strlen(path) + 1;
  if (buffer == nullptr) {
    buffer = static_cast<char*>(std::malloc(std::max(room, size)));
    if (buffer == nullptr) return nullptr;
  } else if (size > room) {
    errno = ERANGE;
    return nullptr;
  }
  return static_cast<char*>(std::memcpy(buffer, path, size));
}

// The visible path of the current directory if it is a packed one, or a parent that does not exist.
bool packed_directory(char (&path)[kPathSize]) {
  if (!mount().has_packs() || Inside::active()) return false;
  char text[kPathSize];
  const std::string_view base = base_of(AT_FDCWD, text);
  if (const std::string_view visible = below_stand_ins(base); !visible.empty()) {
    std::memmove(path, visible.data(), visible.size());
    path[visible.size()] = 0;
    return true;
  }
  const std::int64_t entry = directory_of(base);
  return entry >= 0 && visible_path(static_cast<std::uint32_t>(entry), path, sizeof path) > 0;
}

int scan(DIR* stream, dirent*** result, Filter filter, Order order) {
  if (stream == nullptr) return -1;
  dirent** found = nullptr;
  std::size_t count = 0, room = 0;
  errno = 0;
  while (const dirent* entry = ::readdir(stream)) {
    if (filter != nullptr && filter(entry) == 0) continue;
    if (count == room) {
      room = room == 0 ? 16 : 2 * room;
      auto* larger = static_cast<dirent**>(std::realloc(found, room * sizeof *found));
      if (larger == nullptr) break;
      found = larger;
    }
    auto* copy = static_cast<dirent*>(std::malloc(entry->d_reclen));
    if (copy == nullptr) break;
    std::memcpy(copy, entry, entry->d_reclen);
    found[count++] = copy;
    errno = 0;
  }
  const int error = errno;
  ::closedir(stream);
  if (error != 0) {
    for (std::size_t i = 0; i < count; ++i) std::free(found[i]);
    std::free(found);
    errno = error;
    return -1;
  }
  if (found == nullptr) found = static_cast<dirent**>(std::malloc(sizeof *found));
  using Compare = int (*)(const void*, const void*);
  if (order != nullptr) std::qsort(found, count, sizeof *found, reinterpret_cast<Compare>(order));
  *result = found;
  return static_cast<int>(count);
}

DIR* open_for_scan(int directory, const char* path) {
  const int opened = ::openat(directory, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return opened < 0 ? nullptr : ::fdopendir(opened);
}

}  // namespace

PYDIST_HOOK(int, chdir, const char* path) {
  const Target target(AT_FDCWD, path);
  if (!target.in_pack()) return real_chdir(target.path);
  if (!target.is_entry()) return target.fail();
  struct stat status;
  if (!fill_status(target.entry, status)) return -1;
  if (!S_ISDIR(status.st_mode)) return fail(ENOTDIR);
  if (!permits_search(status.st_mode)) return fail(EACCES);
  char folder[kPathSize];
  return make_folder(target.entry, folder) ? real_chdir(folder) : -1;
}

PYDIST_HOOK(char*, getcwd, char* buffer, std::size_t size) {
  char path[kPathSize];
  if (!packed_directory(path)) return real_getcwd(buffer, size);
  if (size == 0 && buffer != nullptr) {
    errno = EINVAL;
    return nullptr;
  }
  if (buffer == nullptr && size != 0 && std::strlen(path) >= size) {
    errno = ERANGE;
    return nullptr;
  }
  return give(path, buffer, size);
}

PYDIST_HOOK(char*, __getcwd_chk, char* buffer, std::size_t size, std::size_t room) {
  if (size > room) return real___getcwd_chk(buffer, size, room);  // ends the program
  return hook_getcwd(buffer, size);
}

PYDIST_HOOK(char*, getwd, char* buffer) {
  char path[kPathSize];
  return packed_directory(path) ? give(path, buffer, PATH_MAX) : real_getwd(buffer);
}

PYDIST_HOOK(char*, get_current_dir_name) {
  char path[kPathSize];
  return packed_directory(path) ? give(path, nullptr, 0) : real_get_current_dir_name();
}

PYDIST_HOOK(char*, realpath, const char* path, char* buffer) {
  const Target target(AT_FDCWD, path);
  if (!target.in_pack()) {
    const std::string_view visible = below_stand_ins(target.path == nullptr ? "" : target.path);
    return visible.empty() ? real_realpath(target.path, buffer)
                           : give(visible.data(), buffer, PATH_MAX);
  }
  if (!target.is_entry()) return target.fail(), nullptr;
  char visible[kPathSize];
  if (visible_path(target.entry, visible, sizeof visible) == 0) return nullptr;
  return give(visible, buffer, PATH_MAX);
}

PYDIST_HOOK(char*, __realpath_chk, const char* path, char* buffer, std::size_t room) {
  if (room < PATH_MAX) return real___realpath_chk(path, buffer, room);  // ends the program
  return hook_realpath(path, buffer);
}

PYDIST_HOOK(char*, canonicalize_file_name, const char* path) {
  return hook_realpath(path, nullptr);
}

PYDIST_HOOK(int, scandirat, int directory, const char* path, dirent*** result, Filter filter,
            Order order) {
  const Target target(directory, path);
  if (target.in_pack()) return scan(open_for_scan(directory, path), result, filter, order);
  return real_scandirat(target.directory, target.path, result, filter, order);
}
PYDIST_ALIAS(scandirat64, scandirat);

PYDIST_HOOK(int, scandir, const char* path, dirent*** result, Filter filter, Order order) {
  return hook_scandirat(AT_FDCWD, path, result, filter, order);
}
PYDIST_ALIAS(scandir64, scandir);

// glob takes functions that read directories, which are then the hooks.
PYDIST_HOOK(int, glob, const char* pattern, int flags, int (*on_error)(const char*, int),
            glob_t* found) {
  if ((flags & GLOB_ALTDIRFUNC) != 0 || !mount().has_packs())
    return real_glob(pattern, flags, on_error, found);
  found->gl_opendir = [](const char* path) -> void* { return ::opendir(path); };
  found->gl_readdir = [](void* stream) { return ::readdir(static_cast<DIR*>(stream)); };
  found->gl_closedir = [](void* stream) { ::closedir(static_cast<DIR*>(stream)); };
  found->gl_stat = [](const char* path, struct stat* status) { return ::stat(path, status); };
  found->gl_lstat = [](const char* path, struct stat* status) { return ::lstat(path, status); };
  return real_glob(pattern, flags | GLOB_ALTDIRFUNC, on_error, found);
}
PYDIST_ALIAS(glob64, glob);

}  // namespace pydist::preload
