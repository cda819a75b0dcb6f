// The recorder's memory of devices: of the process, and mapped by others; see driver_recorder.cpp.
//
// An allocation is a file without a name, which other processes open through /proc while this one
// lives; no name is left behind, however a process ends. A second mapping of it lies elsewhere, so
// that ranks which are threads can do as processes do (CUDA itself maps no handle of the own
// process). A page behind the memory counts the mappings: what is freed before all others have
// unmapped it is a mistake that CUDA does not report.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "nccl_recorder_streams.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace recorder {

struct Handle {
  char reserved[64];
};

class Memory {
 public:
  std::byte* allocate(std::size_t bytes) {
    const std::size_t size = pages(bytes) + kPage;
#ifdef __linux__
    const int file = memfd_create("recorder", 0);
#else
    const int file = -1;  // there is no CUDA IPC either
#endif
    if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) return nullptr;
    std::byte* start = map_file(file, size);
    if (start == nullptr) return nullptr;
    std::memset(start, 0xa5, std::min<std::size_t>(bytes, kPoisoned));  // nobody promises zeros
    const std::lock_guard lock(mutex_);
    own_[start] = {file, size};
    return start;
  }

  bool release(std::byte* start) {
    const std::lock_guard lock(mutex_);
    const auto found = own_.find(start);
    if (found == own_.end()) return false;
    const int users = counter(start, found->second.size).load();
    if (users > 0) note("mismatch: freed while " + std::to_string(users) + " had it mapped");
    munmap(start, found->second.size);
    close(found->second.file);
    own_.erase(found);
    return true;
  }

  bool name(std::byte* start, Handle& handle) {
    const std::lock_guard lock(mutex_);
    const auto found = own_.find(start);
    if (found == own_.end()) return false;
    handle = {};
    std::snprintf(handle.reserved, sizeof handle.reserved, "/proc/%d/fd/%d %zu", getpid(),
                  found->second.file, found->second.size);
    return true;
  }

  std::byte* map(const Handle& handle) {
    char path[sizeof handle.reserved];
    std::size_t size = 0;
    if (std::sscanf(handle.reserved, "%63s %zu", path, &size) != 2) return nullptr;
    const int file = open(path, O_RDWR);
    if (file < 0) return nullptr;
    std::byte* start = map_file(file, size);
    close(file);
    if (start == nullptr) return nullptr;
    ++counter(start, size);
    const std::lock_guard lock(mutex_);
    mapped_[start] = size;
    return start;
  }

  bool unmap(std::byte* start) {
    const std::lock_guard lock(mutex_);
    const auto found = mapped_.find(start);
    if (found == mapped_.end()) return false;
    --counter(start, found->second);
    munmap(start, found->second);
    mapped_.erase(found);
    return true;
  }

  // Whether it lies in an allocation of this process, and not in a mapping of another one's.
  bool owns(const std::byte* address) {
    const std::lock_guard lock(mutex_);
    auto next = own_.upper_bound(const_cast<std::byte*>(address));
    return next != own_.begin() && address < (--next)->first + next->second.size;
  }

  int blocks() {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(own_.size());
  }

 private:
  struct Block {
    int file = -1;
    std::size_t size = 0;
  };
  static constexpr std::size_t kPage = 4096, kPoisoned = 1 << 16;

  static std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
  static std::byte* map_file(int file, std::size_t size) {
    void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return start == MAP_FAILED ? nullptr : static_cast<std::byte*>(start);
  }
  static std::atomic_ref<int> counter(std::byte* start, std::size_t size) {
    return std::atomic_ref(*reinterpret_cast<int*>(start + size - kPage));
  }

  std::mutex mutex_;
  std::map<std::byte*, Block> own_;
  std::map<std::byte*, std::size_t> mapped_;
};

inline Memory& memory() {
  static auto& all = *new Memory;  // never destroyed: streams may be at work in it to the end
  return all;
}

}  // namespace recorder
