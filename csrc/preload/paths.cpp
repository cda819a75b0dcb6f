// Resolves paths as the kernel does, for the part of them that is below the mount point.
#include "preload/paths.hpp"

#include <fcntl.h>
#include <limits.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "preload/descriptors.hpp"
#include "preload/mount.hpp"

namespace pydist::preload {
namespace {

// Takes the first component off a path; empty at its end.
std::string_view next_component(std::string_view& path) {
  const std::size_t start = path.find_first_not_of('/');
  if (start == std::string_view::npos) {
    path = {};
    return {};
  }
  const std::size_t end = std::min(path.find('/', start), path.size());
  const std::string_view component = path.substr(start, end - start);
  path.remove_prefix(end);
  return component;
}

bool is_at_or_below(std::string_view path, std::string_view folder) {
  return path.substr(0, folder.size()) == folder &&
         (path.size() == folder.size() || path[folder.size()] == '/');
}

// Whether a relative path from `base` can lead to the mount point.
bool can_reach(std::string_view base, std::string_view path) {
  return path.find("..") != std::string_view::npos || base == "/" ||
         is_at_or_below(mount().path, base);
}

// Replaces a real directory's path, without a slash at its end, by that without symbolic links.
// False if there is no such directory.
[[gnu::noinline]] bool follow_links(char (&real)[2 * kPathSize], std::size_t& size) {
  real[size] = 0;
  const auto folder =
      static_cast<int>(syscall(SYS_openat, AT_FDCWD, real, O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (folder < 0) return false;
  char text[kPathSize];
  const std::string_view found = base_of(folder, text);
  syscall(SYS_close, folder);
  if (found.empty()) return false;
  size = found == "/" ? 0 : found.size();
  std::memcpy(real, found.data(), size);
  return true;
}

}  // namespace

bool permits(std::uint32_t mode, unsigned permissions) {
  if ((mode & permissions) == permissions) return true;
  if (geteuid() != 0) return false;
  return (permissions & kExecute) == 0 || (mode & 0111) != 0;
}

bool permits_search(std::uint32_t mode) { return (mode & kExecute) != 0 || geteuid() == 0; }

Target::Target(int directory_given, const char* path_given)
    : directory(directory_given), path(path_given) {
  if (path == nullptr || *path == 0 || Inside::active() || mount().path.empty()) return;
  const Inside inside;
  const int error_before = errno;
  if (*path == '/') {
    resolve("/", path);
  } else {
    char text[kPathSize];
    const std::string_view base = base_of(directory, text);
    if (!base.empty()) resolve(base, path);
  }
  // Not by recursion: a path can do so hundreds of times, in a thread with a small stack.
  while (has_left_) {
    has_left_ = false;
    resolve("/", path);
  }
  errno = error_before;
}

// Follows a path from a real directory, until it enters the mount point or ends.
void Target::resolve(std::string_view base, std::string_view rest) {
  if (rest.size() >= kPathSize) return;  // the C library says so
  if (const std::int64_t folder = directory_of(base); folder >= 0) {
    entry = static_cast<std::uint32_t>(folder);
    return walk(rest);
  }
  if (base.size() > mount().path.size() && is_at_or_below(base, mount().path)) {
    counted = !mount().has_packs();  // a folder that the mount would hide is what it is
    return;
  }
  const std::string_view visible = below_stand_ins(base);
  if (!visible.empty()) base = visible;
  if (rest[0] != '/' && !can_reach(base, rest)) return;
  // The normalized path so far, without a slash at its end. The first `known` bytes are as the
  // kernel has them, without symbolic links.
  char real[2 * kPathSize];
  std::size_t size = base == "/" ? 0 : base.size();
  std::size_t known = size;
  std::memcpy(real, base.data(), size);
  const std::string_view point = mount().path;
  const auto at_missing_parent = [&] {
    return size > mount().existing && is_at_or_below(point, {real, size});
  };
  bool by_missing_parent = !visible.empty();
  while (true) {
    if (std::string_view(real, size) == point) {
      entry = 0;
      return walk(rest);
    }
    const std::string_view component = next_component(rest);
    if (component.empty()) {
      // Programs look at each folder of a path: a missing one that leads to the mount point is a
      // real folder that contains only the next one.
      if (at_missing_parent()) return rewrite(mount().parents, {real, size});
      if (by_missing_parent) rewrite({real, size}, size == 0 ? "/" : "");
      return;
    }
    if (component == ".") continue;
    if (component == "..") {
      by_missing_parent |= at_missing_parent();
      // The parents of the mount point need not exist, and are no links.
      const bool exact = size <= known || is_at_or_below(point, {real, size});
      if (!exact && !follow_links(real, size)) return;  // the C library says so
      while (size > 0 && real[--size] != '/') continue;
      known = size;
      continue;
    }
    real[size++] = '/';
    std::memcpy(real + size, component.data(), component.size());
    size += component.size();
  }
}

// Follows the rest of a path from the packed directory `entry`.
void Target::walk(std::string_view rest) {
  counted = true;
  if (!mount().has_packs()) return;  // ordinary files, whose calls are counted
  place = Place::kPacked;
  slash = !rest.empty() && rest.back() == '/';
  const bool known = attempt(false, [&] {
    const packs::Index& index = pack().index();
    while (true) {
      const std::string_view component = next_component(rest);
      const packs::Entry& at = index.entry(entry);
      const bool directory_here = at.kind == packs::EntryKind::kDirectory;
      if (component.empty()) {
        reached = true;
        if (slash && !directory_here) failed(ENOTDIR);
        return true;
      }
      if (!directory_here) return failed(ENOTDIR), true;
      last = component == "." ? Last::kDot : component == ".." ? Last::kDotDot : Last::kName;
      if (!permits_search(at.mode)) return failed(EACCES), true;
      if (component == ".") continue;
      if (component == "..") {
        if (entry == 0) return leave(rest), true;
        entry = at.parent;
        continue;
      }
      if (entry == 0 && component == mount().output)
        return rewrite(mount().output_target, rest), true;
      if (const auto child = index.child(entry, component)) {
        entry = *child;
        continue;
      }
      failed(component.size() > NAME_MAX ? ENAMETOOLONG : ENOENT);
      reached = next_component(rest).empty();
      if (reached) place = Place::kMissing;
      return true;
    }
  });
  if (!known) failed(errno);
}

// Goes on from the parent of the mount point, which a path can enter again.
void Target::leave(std::string_view rest) {
  const std::string_view point = mount().path;
  rewrite(point.substr(0, point.rfind('/')), rest.empty() ? "/" : rest);
  has_left_ = place == Place::kElsewhere;
}

// The C library gets another path. The rest can be in text_.
void Target::rewrite(std::string_view start, std::string_view rest) {
  if (start.size() + rest.size() >= kPathSize) return failed(ENAMETOOLONG);
  std::memmove(text_ + start.size(), rest.data(), rest.size());
  std::memcpy(text_, start.data(), start.size());
  text_[start.size() + rest.size()] = 0;
  place = Place::kElsewhere;
  directory = AT_FDCWD;
  path = text_;
}

void Target::failed(int reason) {
  place = Place::kFailed;
  error = reason;
}

int Target::fail() const {
  errno = error;
  return -1;
}

std::string_view base_of(int directory, char (&text)[kPathSize]) {
  long size;
  if (directory == AT_FDCWD) {
    size = syscall(SYS_getcwd, text, sizeof text) - 1;
  } else {
    char link[64];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    size = syscall(SYS_readlinkat, AT_FDCWD, link, text, sizeof text - 1);
  }
  if (size <= 0 || text[0] != '/') return {};
  text[size] = 0;
  return {text, static_cast<std::size_t>(size)};
}

std::string_view below_stand_ins(std::string_view real) {
  const std::string_view parents = mount().parents;
  const bool below = real.size() > parents.size() && is_at_or_below(real, parents);
  return below ? real.substr(parents.size()) : std::string_view{};
}

std::size_t visible_path(std::uint32_t entry, char* text, std::size_t size) {
  return attempt(std::size_t{0}, [&]() -> std::size_t {
    std::string path(mount().path);
    if (entry != 0) path.append("/").append(pack().index().path(entry));
    if (path.size() >= size) {
      errno = ERANGE;
      return 0;
    }
    std::memcpy(text, path.c_str(), path.size() + 1);
    return path.size();
  });
}

}  // namespace pydist::preload
