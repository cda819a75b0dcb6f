// The counters of a program, in a file that all of its processes map.
#include "preload/profile.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "preload/mount.hpp"

namespace pydist::preload {
namespace {

using Counter = std::atomic<std::uint64_t>;
constexpr std::size_t kKinds = static_cast<std::size_t>(CallKind::kCount);
constexpr std::size_t kSlots = std::size_t{1} << 22;
constexpr int kMostTracked = 1 << 16;

struct Calls {
  Counter calls, failed, bytes, nanoseconds;
  Counter threads, most_threads, processes, most_processes;  // in such a call now, and at most
};

// pydist/cli/store_profile.py makes the file and reads all but `seen`.
struct Shared {
  Calls kinds[kKinds];
  Counter files, directories, processes;
  Counter seen[kSlots];  // hashes of device and inode; pages that are not used take no memory
};

std::atomic<Shared*> shared{nullptr};
std::atomic<bool> off{false};
std::atomic<std::uint32_t> in_progress[kKinds];  // in this process
std::atomic<std::uint8_t> below_mount[kMostTracked];

void enter_process() {
  for (auto& calls : in_progress) calls = 0;
  ++shared.load()->processes;
}

Shared* counters() {
  Shared* known = shared.load(std::memory_order_acquire);
  if (known != nullptr || off.load(std::memory_order_relaxed)) return known;
  const Inside inside;
  const char* file = std::getenv("PYDIST_MOUNT_PROFILE");
  off = true;
  if (file == nullptr || *file == 0) return nullptr;
  const int opened = static_cast<int>(syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC));
  if (opened < 0) return nullptr;
  struct stat status;
  void* mapped = MAP_FAILED;
  if (fstat(opened, &status) == 0 && status.st_size >= static_cast<off_t>(sizeof(Shared)))
    mapped = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
  syscall(SYS_close, opened);
  if (mapped == MAP_FAILED) return nullptr;
  shared.store(static_cast<Shared*>(mapped), std::memory_order_release);
  enter_process();
  pthread_atfork(nullptr, nullptr, enter_process);
  return shared;
}

void raise(Counter& most, std::uint64_t value) {
  std::uint64_t known = most.load(std::memory_order_relaxed);
  while (known < value && !most.compare_exchange_weak(known, value)) continue;
}

std::uint64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(time.tv_nsec);
}

std::uint64_t mix(std::uint64_t x) {  // splitmix64's finalizer (Steele et al. 2014)
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace

bool profiling() { return counters() != nullptr; }

void track(int descriptor, bool below) {
  if (descriptor < 0 || descriptor >= kMostTracked || !profiling()) return;
  if (has_memory_of_parent()) return;
  below_mount[descriptor].store(below, std::memory_order_relaxed);
}

bool tracked(int descriptor) {
  if (descriptor < 0 || descriptor >= kMostTracked || Inside::active() || !profiling())
    return false;
  return below_mount[descriptor].load(std::memory_order_relaxed) != 0;
}

void count_file(const struct stat& status) {
  Shared* all = counters();
  if (all == nullptr) return;
  const std::uint64_t key = mix(status.st_ino + 0x9E3779B97F4A7C15 * mix(status.st_dev)) | 1;
  for (std::size_t probe = 0; probe < 64; ++probe) {
    Counter& slot = all->seen[(key + probe) % kSlots];
    std::uint64_t found = 0;
    if (slot.compare_exchange_strong(found, key)) {
      ++(S_ISDIR(status.st_mode) ? all->directories : all->files);
      return;
    }
    if (found == key) return;
  }
}

Call::Call(CallKind kind, bool below)
    : kind_(kind), counted_(below && !Inside::active() && profiling()) {
  if (!counted_) return;
  Calls& calls = shared.load()->kinds[static_cast<std::size_t>(kind)];
  raise(calls.most_threads, ++calls.threads);
  if (in_progress[static_cast<std::size_t>(kind)]++ == 0)
    raise(calls.most_processes, ++calls.processes);
  start_ = now();
}

Call::~Call() {
  if (!counted_) return;
  Calls& calls = shared.load()->kinds[static_cast<std::size_t>(kind_)];
  calls.nanoseconds += now() - start_;
  ++calls.calls;
  if (failed_) ++calls.failed;
  calls.bytes += bytes_;
  if (--in_progress[static_cast<std::size_t>(kind_)] == 0) --calls.processes;
  --calls.threads;
}

}  // namespace pydist::preload
