// Reads files in place, and moves their positions, which the kernel holds.
#include "preload/in_place.hpp"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <span>

#include "preload/mount.hpp"

namespace pydist::preload {
namespace {

constexpr std::size_t kMostAtOnce = 0x7ffff000;  // of read, as in the kernel

constexpr unsigned kMoving = 64;  // descriptors that share a flag wait for each other
std::atomic_flag moving[kMoving];
std::atomic<bool> prepared{false};

}  // namespace

bool is_in_place(ssize_t result, int error, int descriptor, OpenDescriptor& known) {
  if (result >= 0 || errno != error || Inside::active()) [[likely]]
    return false;
  known = identify(descriptor);
  if (known.held == Held::kInPlace) return true;
  errno = known.held == Held::kDirectory && error == EBADF ? EISDIR : error;
  return false;
}

ssize_t read_in_place(OpenDescriptor known, void* bytes, std::size_t size, off_t offset) {
  if (offset < 0) {
    errno = EINVAL;
    return -1;
  }
  return attempt(ssize_t{-1}, [&] {
    const std::span out(static_cast<std::byte*>(bytes), std::min(size, kMostAtOnce));
    return static_cast<ssize_t>(pack().pread(known.entry, static_cast<std::uint64_t>(offset), out));
  });
}

Moving::Moving(int descriptor) : moved_(moving[static_cast<unsigned>(descriptor) % kMoving]) {
  if (!prepared.exchange(true)) {
    pthread_atfork(nullptr, nullptr, [] {
      for (std::atomic_flag& each : moving) each.clear();
    });
  }
  while (moved_.test_and_set(std::memory_order_acquire)) moved_.wait(true);
}

Moving::~Moving() {
  moved_.clear(std::memory_order_release);
  moved_.notify_one();
}

off_t position_of(int descriptor) { return syscall(SYS_lseek, descriptor, 0, SEEK_CUR); }

void set_position(int descriptor, off_t position) {
  syscall(SYS_lseek, descriptor, position, SEEK_SET);
}

}  // namespace pydist::preload
