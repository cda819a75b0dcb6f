// Makes and recognizes the descriptors of packed files and directories.
#include "preload/descriptors.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>

#include "preload/cache.hpp"
#include "preload/mount.hpp"

namespace pydist::preload {
namespace {

constexpr mode_t kFolderMode = 0111;   // no listing: listing it without a hook fails
constexpr mode_t kInPlaceMode = 0222;  // reopening a file in place to read it fails
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
constexpr int kMostOwn = 1 << 16;
constexpr int kRoomForOwn = 4608;  // as many as a pack has partitions, and some

std::atomic<std::uint64_t> own[kMostOwn / 64];

// Closes the descriptor that it holds.
struct Closed {
  int number;
  ~Closed() {
    const int error = errno;
    if (number >= 0) syscall(SYS_close, number);
    errno = error;
  }
};

bool take(std::string_view& text, std::string_view start) {
  if (text.substr(0, start.size()) != start) return false;
  text.remove_prefix(start.size());
  return true;
}

// Makes a memfd of a size whose name says what it holds.
int make_memfd(char letter, std::uint32_t entry, std::uint64_t size) {
  char name[128];
  std::snprintf(name, sizeof name, "%s.%c.%u", mount().identity.data(), letter, entry);
  const int made = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made >= 0 && (size == 0 || ftruncate(made, static_cast<off_t>(size)) == 0)) return made;
  const Closed closed{made};
  return -1;
}

// Opens a memfd again, as the program wants it.
int reopen(int memfd, int flags) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", memfd);
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags & ~kOfPaths));
}

}  // namespace

std::int64_t number_of(std::string_view text) {
  if (text.empty() || text.size() > 10) return -1;
  std::int64_t number = 0;
  for (const char digit : text) {
    if (digit < '0' || digit > '9') return -1;
    number = number * 10 + (digit - '0');
  }
  return number <= UINT32_MAX ? number : -1;
}

bool fill(int empty, std::uint32_t entry) {
  int error = 0;
  const bool read = attempt(false, [&] {
    pack().pass(entry, [&](std::uint64_t offset, std::span<const std::byte> bytes) {
      while (error == 0 && !bytes.empty()) {
        const long done = syscall(SYS_pwrite64, empty, bytes.data(), bytes.size(), offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) error = done < 0 ? errno : ENOSPC;
        if (done <= 0) return;
        bytes = bytes.subspan(static_cast<std::size_t>(done));
        offset += static_cast<std::uint64_t>(done);
      }
    });
    return true;
  });
  if (error != 0) errno = error;
  return read && error == 0;
}

std::int64_t directory_of(std::string_view path) {
  if (!mount().has_packs()) return -1;
  const bool below = take(path, mount().folders) && take(path, "/");
  return below ? number_of(path.substr(0, path.find(' '))) : -1;  // "17 (deleted)"
}

OpenDescriptor identify_name(const char* name) {
  std::string_view text(name);
  if (const std::int64_t entry = directory_of(text); entry >= 0)
    return {Held::kDirectory, static_cast<std::uint32_t>(entry)};
  if (const std::int64_t entry = cached_entry(text); entry >= 0)
    return {Held::kCopy, static_cast<std::uint32_t>(entry)};
  if (!take(text, "/memfd:") || !take(text, mount().identity)) return {};
  const Held held = take(text, ".f.")   ? Held::kCopy
                    : take(text, ".p.") ? Held::kInPlace
                    : take(text, ".n.") ? Held::kPathOnly
                                        : Held::kOther;
  const std::int64_t entry = number_of(text.substr(0, text.find(' ')));
  if (held == Held::kOther || entry < 0) return {};
  return {held, static_cast<std::uint32_t>(entry)};
}

OpenDescriptor identify(int descriptor) {
  if (descriptor < 0 || !mount().has_packs()) return {};
  char link[64];
  char name[PATH_MAX];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const long size = syscall(SYS_readlinkat, AT_FDCWD, link, name, sizeof name - 1);
  if (size <= 0) return {};
  name[size] = 0;
  return identify_name(name);
}

OpenDescriptor identify(int descriptor, const struct stat& status) {
  const bool file = S_ISREG(status.st_mode) && (status.st_nlink == 0 || is_cached(status.st_mode));
  // A umask may have removed bits, and a folder above given its own group.
  const bool folder = S_ISDIR(status.st_mode) && (status.st_mode & 0777 & ~kFolderMode) == 0;
  return file || folder ? identify(descriptor) : OpenDescriptor{};
}

int open_copy(std::uint32_t entry, int flags) {
  const Inside inside;
  const Apart apart;
  const Closed memfd{make_memfd('f', entry, 0)};
  if (memfd.number < 0 || !fill(memfd.number, entry)) return -1;
  fcntl(memfd.number, F_ADD_SEALS, kSeals);
  return reopen(memfd.number, flags);
}

int open_in_place(std::uint32_t entry, int flags) {
  const Inside inside;
  const Apart apart;
  const std::uint64_t size = attempt(UINT64_MAX, [&] { return pack().file(entry).raw_size; });
  if (size == UINT64_MAX) return -1;
  const Closed memfd{make_memfd('p', entry, size)};
  if (memfd.number < 0 || fcntl(memfd.number, F_ADD_SEALS, kSeals) != 0) return -1;
  if (fchmod(memfd.number, kInPlaceMode) != 0) return -1;
  return reopen(memfd.number, (flags & ~O_ACCMODE) | O_WRONLY);
}

int open_path_only(std::uint32_t entry, int flags) {
  const Inside inside;
  const Closed memfd{make_memfd('n', entry, 0)};
  return memfd.number < 0 ? -1 : reopen(memfd.number, flags);
}

int open_part(std::uint32_t entry, std::uint64_t offset, std::size_t size) {
  const Inside inside;
  const Closed memfd{make_memfd('m', entry, size)};
  if (memfd.number < 0) return -1;
  void* pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.number, 0);
  if (pages == MAP_FAILED) return -1;
  const bool read = attempt(false, [&] {
    pack().pread(entry, offset, {static_cast<std::byte*>(pages), size});
    return true;
  });
  const int error = errno;
  munmap(pages, size);
  errno = error;
  if (!read || fcntl(memfd.number, F_ADD_SEALS, kSeals) != 0) return -1;
  return reopen(memfd.number, O_RDONLY | O_CLOEXEC);
}

bool make_folder(std::uint32_t entry, char (&path)[4096]) {
  std::snprintf(path, sizeof path, "%s/%u", mount().folders.data(), entry);
  if (syscall(SYS_mkdirat, AT_FDCWD, path, kFolderMode) == 0 || errno == EEXIST) return true;
  if (errno != ENOENT) return false;
  // A program that outlives `pydist store exec`.
  syscall(SYS_mkdirat, AT_FDCWD, mount().folders.data(), S_IRWXU);
  return syscall(SYS_mkdirat, AT_FDCWD, path, kFolderMode) == 0 || errno == EEXIST;
}

int open_directory(std::uint32_t entry, int flags) {
  char path[4096];
  if (!make_folder(entry, path)) return -1;
  const int kept = O_PATH | O_DIRECTORY | (flags & O_CLOEXEC);
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, kept));
}

int keep_own(int descriptor) {
  if (descriptor < 0 || Apart::current() != nullptr) return descriptor;
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  int from = limit.rlim_cur < kMostOwn ? static_cast<int>(limit.rlim_cur) : kMostOwn;
  from -= from < 2 * kRoomForOwn ? from / 2 : kRoomForOwn;
  const int kept = static_cast<int>(syscall(SYS_fcntl, descriptor, F_DUPFD_CLOEXEC, from));
  const Closed closed{kept < 0 ? -1 : descriptor};
  const int result = kept < 0 ? descriptor : kept;
  if (result < kMostOwn) own[result / 64] |= std::uint64_t{1} << (result % 64);
  return result;
}

bool is_own(int descriptor) {
  if (descriptor < 0 || descriptor >= kMostOwn) return false;
  return (own[descriptor / 64].load(std::memory_order_relaxed) >> (descriptor % 64)) & 1;
}

void release_own(int descriptor) {
  if (is_own(descriptor)) own[descriptor / 64] &= ~(std::uint64_t{1} << (descriptor % 64));
}

}  // namespace pydist::preload
