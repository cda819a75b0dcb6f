// Hooks of what starts programs that are packed files: they run from a copy.
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <vector>

#include "preload/hook.hpp"
#include "preload/mount.hpp"
#include "preload/open.hpp"
#include "preload/paths.hpp"
#include "preload/status.hpp"

extern char** environ;

namespace pydist::preload {
namespace {

// The path by which a program starts: of a packed file, the link to a copy that stays open. The
// interpreter of a script opens it again, so it can't be closed by exec.
class Program {
 public:
  explicit Program(const char* path) : target_(AT_FDCWD, path), path_(target_.path) {
    if (!target_.in_pack()) return;
    path_ = nullptr;
    struct stat status;
    if (!target_.is_entry()) {
      target_.fail();
    } else if (fill_status(target_.entry, status)) {
      open(status.st_mode);
    }
  }
  ~Program() {
    const int error = errno;
    if (descriptor_ >= 0) ::close(descriptor_);
    errno = error;
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  const char* path() const { return path_; }  // nullptr, with errno, if there is none

 private:
  void open(mode_t mode) {
    if (!S_ISREG(mode) || !permits(mode, kExecute)) {
      errno = EACCES;
      return;
    }
    descriptor_ = open_whole(target_, O_RDONLY);
    if (descriptor_ < 0) return;
    std::snprintf(link_, sizeof link_, "/proc/self/fd/%d", descriptor_);
    path_ = link_;
  }

  Target target_;
  const char* path_;
  int descriptor_ = -1;
  char link_[64];
};

using Words = std::vector<char*>;

// The arguments of execl, up to and with the null pointer.
Words collect(const char* first, va_list rest) {
  Words words{const_cast<char*>(first)};
  while (words.back() != nullptr) words.push_back(va_arg(rest, char*));
  return words;
}

bool has_slash(const char* path) { return path != nullptr && std::strchr(path, '/') != nullptr; }

}  // namespace

PYDIST_HOOK(int, execve, const char* path, char* const* arguments, char* const* environment) {
  const Program program(path);
  return program.path() == nullptr ? -1 : real_execve(program.path(), arguments, environment);
}

PYDIST_HOOK(int, execv, const char* path, char* const* arguments) {
  return hook_execve(path, arguments, environ);
}

PYDIST_HOOK(int, execvpe, const char* file, char* const* arguments, char* const* environment) {
  if (!has_slash(file)) return real_execvpe(file, arguments, environment);
  const Program program(file);
  return program.path() == nullptr ? -1 : real_execvpe(program.path(), arguments, environment);
}

PYDIST_HOOK(int, execvp, const char* file, char* const* arguments) {
  return hook_execvpe(file, arguments, environ);
}

PYDIST_HOOK(int, execl, const char* path, const char* first, ...) {
  va_list rest;
  va_start(rest, first);
  const Words words = collect(first, rest);
  va_end(rest);
  return hook_execve(path, words.data(), environ);
}

PYDIST_HOOK(int, execlp, const char* file, const char* first, ...) {
  va_list rest;
  va_start(rest, first);
  const Words words = collect(first, rest);
  va_end(rest);
  return hook_execvpe(file, words.data(), environ);
}

PYDIST_HOOK(int, execle, const char* path, const char* first, ...) {
  va_list rest;
  va_start(rest, first);
  const Words words = collect(first, rest);
  char* const* environment = va_arg(rest, char* const*);
  va_end(rest);
  return hook_execve(path, words.data(), environment);
}

PYDIST_HOOK(int, posix_spawn, pid_t* child, const char* path,
            const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes,
            char* const* arguments, char* const* environment) {
  const Program program(path);
  if (program.path() == nullptr) return errno;
  return real_posix_spawn(child, program.path(), actions, attributes, arguments, environment);
}

PYDIST_HOOK(int, posix_spawnp, pid_t* child, const char* file,
            const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes,
            char* const* arguments, char* const* environment) {
  if (!has_slash(file))
    return real_posix_spawnp(child, file, actions, attributes, arguments, environment);
  return hook_posix_spawn(child, file, actions, attributes, arguments, environment);
}

}  // namespace pydist::preload
