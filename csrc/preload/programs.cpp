// Hooks of what starts programs that are packed files: they run from a copy.
#include <alloca.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
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

// The path by which a program starts: of a packed file, the link to a copy that stays open; of a
// packed script, that of its interpreter, which may be packed, too. The kernel would give the
// interpreter the link as the name of the script, which finds the files beside it by that name.
class Program {
 public:
  // depth: number of scripts whose interpreter this is.
  explicit Program(const char* path, int depth = 0)
      : target_(AT_FDCWD, path), path_(target_.path), name_(path), depth_(depth) {
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

  // Calls `run` with the path and with the arguments that belong to it; returns -1 with errno if
  // there is none. The arguments are on the stack: the child of a vfork would leave them in its
  // parent's heap.
  template <class Run>
  int start(char* const* arguments, Run run) const {
    if (interpreter_ == nullptr) return path_ == nullptr ? -1 : run(path_, arguments);
    if (depth_ == kMostScripts) return fail(ELOOP);
    std::size_t count = 0;
    while (arguments != nullptr && arguments[count] != nullptr) ++count;
    auto** const words = static_cast<char**>(alloca((count + 4) * sizeof(char*)));
    char** next = words;
    *next++ = const_cast<char*>(interpreter_);
    if (option_ != nullptr) *next++ = const_cast<char*>(option_);
    *next++ = const_cast<char*>(name_);
    for (std::size_t k = 1; k < count; ++k) *next++ = arguments[k];
    *next = nullptr;
    return Program(interpreter_, depth_ + 1).start(words, run);
  }

 private:
  // Of which each is the interpreter of another, as in Linux.
  static constexpr int kMostScripts = 5;

  void open(mode_t mode) {
    if (!S_ISREG(mode) || !permits(mode, kExecute)) {
      errno = EACCES;
      return;
    }
    descriptor_ = open_whole(target_, O_RDONLY);
    if (descriptor_ < 0) return;
    if (read_first_line()) {
      ::close(descriptor_);
      descriptor_ = -1;
      return;
    }
    // This process by its number: the child of posix_spawn may close the descriptor before it
    // starts the program. getpid() is another number where /proc is of another namespace.
    char self[16];
    const ssize_t size = ::readlink("/proc/self", self, sizeof self);
    if (size < 0) return;
    std::snprintf(link_, sizeof link_, "/proc/%.*s/fd/%d", static_cast<int>(size), self,
                  descriptor_);
    path_ = link_;
  }

  // Takes "#! INTERPRETER [OPTION]" apart, as the kernel does; false if that is not the first line.
  bool read_first_line() {
    constexpr const char* kBlanks = " \t";
    const ssize_t size = ::pread(descriptor_, line_, sizeof line_ - 1, 0);
    if (size < 2 || line_[0] != '#' || line_[1] != '!') return false;
    line_[size] = '\0';
    char* const end = std::strchr(line_, '\n');
    if (end == nullptr) return false;
    *end = '\0';
    for (char* last = end; std::strchr(kBlanks, last[-1]) != nullptr;) *--last = '\0';
    char* const first = line_ + 2 + std::strspn(line_ + 2, kBlanks);
    if (*first == '\0') return false;
    interpreter_ = first;
    if (char* const blank = std::strpbrk(first, kBlanks); blank != nullptr) {
      *blank = '\0';
      option_ = blank + 1 + std::strspn(blank + 1, kBlanks);
    }
    return true;
  }

  Target target_;
  const char* path_;
  const char* name_;
  int depth_;
  const char* interpreter_ = nullptr;
  const char* option_ = nullptr;
  int descriptor_ = -1;
  char link_[64];
  char line_[256];  // as much as the kernel reads
};

using Words = std::vector<char*>;

// The arguments of execl, up to and with the null pointer.
Words collect(const char* first, va_list rest) {
  Words words{const_cast<char*>(first)};
  while (words.back() != nullptr) words.push_back(va_arg(rest, char*));
  return words;
}

bool has_slash(const char* path) { return path != nullptr && std::strchr(path, '/') != nullptr; }

// Whether the first program of that name in the folders of PATH is packed; `found` is its path. The
// C library searches by calls of its own, which see no pack. `denied`: the error for a name that is
// found nowhere, as a packed file that may not run was passed over.
bool find_packed(const char* name, char (&found)[kPathSize], int& denied) {
  denied = ENOENT;
  const char* folders = std::getenv("PATH");
  if (name == nullptr || *name == '\0' || has_slash(name)) return false;
  while (folders != nullptr) {
    const char* const end = strchrnul(folders, ':');
    const int size = static_cast<int>(end - folders);  // 0: the current directory
    const int length =
        std::snprintf(found, sizeof found, "%.*s%s%s", size, folders, size > 0 ? "/" : "", name);
    struct stat status;
    if (length < static_cast<int>(sizeof found) && status_of(AT_FDCWD, found, &status, 0) == 0 &&
        S_ISREG(status.st_mode)) {
      const bool packed = Target(AT_FDCWD, found).in_pack();
      if (packed ? permits(status.st_mode, kExecute)
                 : syscall(SYS_faccessat, AT_FDCWD, found, X_OK) == 0)
        return packed;
      denied = EACCES;
    }
    folders = *end == '\0' ? nullptr : end + 1;
  }
  return false;
}

}  // namespace

PYDIST_HOOK(int, execve, const char* path, char* const* arguments, char* const* environment) {
  return Program(path).start(arguments, [&](const char* start, char* const* words) {
    return real_execve(start, words, environment);
  });
}

PYDIST_HOOK(int, execv, const char* path, char* const* arguments) {
  return hook_execve(path, arguments, environ);
}

PYDIST_HOOK(int, execvpe, const char* file, char* const* arguments, char* const* environment) {
  char found[kPathSize];
  int denied;
  const bool packed = find_packed(file, found, denied);
  if (!packed && !has_slash(file)) {
    real_execvpe(file, arguments, environment);
    if (errno == ENOENT) errno = denied;
    return -1;
  }
  return Program(packed ? found : file)
      .start(arguments, [&](const char* start, char* const* words) {
        return real_execvpe(start, words, environment);
      });
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
  const int error = Program(path).start(arguments, [&](const char* start, char* const* words) {
    return real_posix_spawn(child, start, actions, attributes, words, environment);
  });
  return error < 0 ? errno : error;
}

PYDIST_HOOK(int, posix_spawnp, pid_t* child, const char* file,
            const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes,
            char* const* arguments, char* const* environment) {
  char found[kPathSize];
  int denied;
  if (find_packed(file, found, denied))
    return hook_posix_spawn(child, found, actions, attributes, arguments, environment);
  if (!has_slash(file)) {
    const int error = real_posix_spawnp(child, file, actions, attributes, arguments, environment);
    return error == ENOENT ? denied : error;
  }
  return hook_posix_spawn(child, file, actions, attributes, arguments, environment);
}

}  // namespace pydist::preload
