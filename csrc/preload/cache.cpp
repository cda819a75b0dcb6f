// Makes and opens the files of the cache.
#include "preload/cache.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>

#include "preload/descriptors.hpp"
#include "preload/mount.hpp"

namespace pydist::preload {
namespace {

constexpr mode_t kMode = S_ISVTX | 0444;
constexpr std::uint64_t kPage = 4096;
constexpr std::size_t kLongest = 4096;  // of a path

using Counter = std::atomic<std::uint64_t>;
static_assert(Counter::is_always_lock_free && sizeof(Counter) == sizeof(std::uint64_t));

std::atomic<Counter*> shared{nullptr};

int open_raw(const char* path, int flags, mode_t mode = 0) {
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, mode));
}

// The bytes of the cache that are taken, which all processes count in one file.
Counter* taken() {
  Counter* known = shared.load(std::memory_order_acquire);
  if (known != nullptr) return known;
  char path[kLongest];
  std::snprintf(path, sizeof path, "%s/taken", mount().folders.data());
  const int file = open_raw(path, O_RDWR);
  if (file < 0) return nullptr;
  void* mapped = mmap(nullptr, sizeof(Counter), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  syscall(SYS_close, file);
  if (mapped == MAP_FAILED) return nullptr;
  auto* made = static_cast<Counter*>(mapped);
  if (shared.compare_exchange_strong(known, made)) return made;
  munmap(mapped, sizeof(Counter));
  return known;
}

// Room for a file of some bytes, which is given back unless it is used.
class Room {
 public:
  explicit Room(std::uint64_t size) : size_((size + kPage - 1) / kPage * kPage) {
    Counter* counter = taken();
    if (counter == nullptr || size_ > mount().cache) return;
    if (counter->fetch_add(size_) <= mount().cache - size_) {
      counter_ = counter;
    } else {
      counter->fetch_sub(size_);
    }
  }
  ~Room() {
    if (counter_ != nullptr) counter_->fetch_sub(size_);
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  explicit operator bool() const { return counter_ != nullptr; }
  void use() { counter_ = nullptr; }

 private:
  std::uint64_t size_;
  Counter* counter_ = nullptr;
};

}  // namespace

int open_cached(std::uint32_t entry, int flags) {
  if (mount().cache == 0) return -1;
  const Inside inside;
  flags &= ~kOfPaths;
  char path[kLongest];
  std::snprintf(path, sizeof path, "%s/f%u", mount().folders.data(), entry);
  const int opened = static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags));
  if (opened >= 0 || errno != ENOENT) return opened;
  const Apart apart;
  const std::uint64_t size = attempt(UINT64_MAX, [&] { return pack().file(entry).raw_size; });
  if (size == UINT64_MAX) return -1;
  Room room(size);
  if (!room) return -1;
  // Without a name until it is complete. Several processes may make it at the same time.
  const int made = open_raw(mount().folders.data(), O_TMPFILE | O_RDWR, kMode);
  if (made < 0) return -1;
  char link[64];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", made);
  const bool filled = fill(made, entry);
  if (!filled && errno == ENOSPC) room.use();  // there is less than there should be
  const bool linked =
      filled && syscall(SYS_linkat, AT_FDCWD, link, AT_FDCWD, path, AT_SYMLINK_FOLLOW) == 0;
  if (linked) room.use();
  const bool there = linked || (filled && errno == EEXIST);
  syscall(SYS_close, made);
  return there ? static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags)) : -1;
}

std::int64_t cached_entry(std::string_view path) {
  const std::string_view folder = mount().folders;
  const std::string_view start = "/f";
  if (path.substr(0, folder.size()) != folder) return -1;
  path.remove_prefix(folder.size());
  if (path.substr(0, start.size()) != start) return -1;
  path.remove_prefix(start.size());
  return number_of(path.substr(0, path.find(' ')));  // "f17 (deleted)"
}

}  // namespace pydist::preload
