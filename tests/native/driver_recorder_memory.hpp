// The recorder's memory of devices: of the process, and mapped by others; see driver_recorder.cpp.
//
// An allocation is a file that all can open (recorder_file.hpp). A second mapping of it lies
// elsewhere, so that ranks which are threads can do as processes do (CUDA itself maps no handle of
// the own process). A page behind the memory counts the mappings: what is freed before all others
// have unmapped it is a mistake that CUDA does not report.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "nccl_recorder_streams.hpp"
#include "recorder_file.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace recorder {

struct Handle {
  char reserved[64];
};

class Memory {
 public:
  std::byte* allocate(std::size_t bytes) {
    File file = File::make(pages(bytes) + kPage);
    std::byte* start = file ? file.map() : nullptr;
    if (start == nullptr) return nullptr;
    std::memset(start, 0xa5, std::min<std::size_t>(bytes, kPoisoned));  // nobody promises zeros
    const std::lock_guard lock(mutex_);
    own_[start] = std::move(file);
    return start;
  }

  bool release(std::byte* start) {
    const std::lock_guard lock(mutex_);
    const auto found = own_.find(start);
    if (found == own_.end()) return false;
    const std::size_t size = found->second.bytes();
    const int users = counter(start, size).load();
    if (users > 0) note("mismatch: freed while " + std::to_string(users) + " had it mapped");
    munmap(start, size);
    own_.erase(found);
    return true;
  }

  bool name(std::byte* start, Handle& handle) {
    const std::lock_guard lock(mutex_);
    const auto found = own_.find(start);
    if (found == own_.end()) return false;
    const std::string& name = found->second.name();
    handle = {};
    name.copy(handle.reserved, sizeof handle.reserved - 1);
    return name.size() < sizeof handle.reserved;
  }

  std::byte* map(const Handle& handle) {
    const File file = File::open(handle.reserved);
    std::byte* start = file ? file.map() : nullptr;
    if (start == nullptr) return nullptr;
    const std::size_t size = file.bytes();
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
    return next != own_.begin() && address < (--next)->first + next->second.bytes();
  }

  int blocks() {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(own_.size());
  }

 private:
  static constexpr std::size_t kPage = 4096, kPoisoned = 1 << 16;

  static std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
  static std::atomic_ref<int> counter(std::byte* start, std::size_t size) {
    return std::atomic_ref(*reinterpret_cast<int*>(start + size - kPage));
  }

  std::mutex mutex_;
  std::map<std::byte*, File> own_;
  std::map<std::byte*, std::size_t> mapped_;
};

inline Memory& memory() {
  static auto& all = *new Memory;  // never destroyed: streams may be at work in it to the end
  return all;
}

}  // namespace recorder
