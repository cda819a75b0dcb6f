// Hooks of what takes the path of a Unix socket or of a watch: they reach the output folder.
#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "preload/hook.hpp"
#include "preload/paths.hpp"

namespace pydist::preload {
namespace {

constexpr std::size_t kMost = sizeof(sockaddr_un::sun_path);

// Writes a path as an address. One that is too long gets a shorter name by way of its folder, which
// is opened. Returns the folder's descriptor, -1 if none was needed, or -2 with errno.
int write_address(const char* path, sockaddr_un& address) {
  address.sun_family = AF_UNIX;
  const std::size_t size = std::strlen(path);
  if (size < kMost) {
    std::memcpy(address.sun_path, path, size + 1);
    return -1;
  }
  const char* const name = std::strrchr(path, '/');
  char parent[kPathSize];
  std::snprintf(parent, sizeof parent, "%.*s", static_cast<int>(name + 1 - path), path);
  const auto folder =
      static_cast<int>(syscall(SYS_openat, AT_FDCWD, parent, O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (folder < 0) return -2;
  const int length = std::snprintf(address.sun_path, kMost, "/proc/self/fd/%d%s", folder, name);
  if (length < static_cast<int>(kMost)) return folder;
  syscall(SYS_close, folder);
  errno = ENAMETOOLONG;
  return -2;
}

// Calls pass(address, size) with an address as the kernel has it, or refuse(target) for the path of
// a packed file. Nothing is to be destroyed: a thread can be cancelled while it connects.
template <class Refuse, class Pass>
int with_address(const sockaddr* given, socklen_t size, Refuse refuse, Pass pass) {
  constexpr std::size_t kStart = offsetof(sockaddr_un, sun_path);
  if (given == nullptr || size <= kStart || given->sa_family != AF_UNIX) return pass(given, size);
  char path[kMost + 1];  // an address need not end with a null byte
  const std::size_t length = std::min(size - kStart, kMost);
  std::memcpy(path, reinterpret_cast<const char*>(given) + kStart, length);
  path[length] = 0;
  const Target target(AT_FDCWD, path);
  if (target.in_pack()) return refuse(target);
  if (target.path == path) return pass(given, size);
  sockaddr_un address{};
  const int folder = write_address(target.path, address);
  if (folder == -2) return -1;
  const int result = pass(reinterpret_cast<const sockaddr*>(&address), sizeof address);
  const int error = errno;
  if (folder >= 0) syscall(SYS_close, folder);
  errno = error;
  return result;
}

}  // namespace

PYDIST_HOOK(int, bind, int socket, const sockaddr* address, socklen_t size) {
  const auto refuse = [](const Target& at) {
    if (at.is_entry()) return fail(EADDRINUSE);
    return at.reached && at.error == ENOENT ? fail(EROFS) : at.fail();
  };
  return with_address(address, size, refuse, [&](const sockaddr* passed, socklen_t bytes) {
    return real_bind(socket, passed, bytes);
  });
}

PYDIST_HOOK(int, connect, int socket, const sockaddr* address, socklen_t size) {
  const auto refuse = [](const Target& at) {
    return at.is_entry() ? fail(ECONNREFUSED) : at.fail();
  };
  return with_address(address, size, refuse, [&](const sockaddr* passed, socklen_t bytes) {
    return real_connect(socket, passed, bytes);
  });
}

// Packed files have no watches: the kernel does not know them.
PYDIST_HOOK(int, inotify_add_watch, int watches, const char* path, std::uint32_t events) {
  const Target at(AT_FDCWD, path);
  if (at.in_pack()) return at.is_entry() ? fail(ENOENT) : at.fail();
  return real_inotify_add_watch(watches, at.path, events);
}

}  // namespace pydist::preload
