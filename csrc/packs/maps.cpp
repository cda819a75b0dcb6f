// Maps partitions, and asks the kernel whether it has their bytes.
#include "packs/maps.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

namespace pydist::packs {
namespace {

#if defined(__linux__) && defined(RWF_NOWAIT)

// Page tables take a 512th of what is mapped and was read, in each process.
constexpr std::uint64_t kMostMapped = std::uint64_t{64} << 30;
constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, since Linux 5.14

// Whether the page cache has a byte of a file. Not where the file system can't say so.
bool is_cached(int file, std::uint64_t offset) {
  std::byte byte;
  const iovec room{&byte, 1};
  return ::preadv2(file, &room, 1, static_cast<off_t>(offset), RWF_NOWAIT) == 1;
}

// Whether the process may have as many addresses as it likes.
bool has_addresses() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur == RLIM_INFINITY;
}

#endif

}  // namespace

PartitionMaps::PartitionMaps(std::uint32_t partitions)
    : partitions_(partitions), maps_(std::make_unique<Map[]>(partitions)) {}

PartitionMaps::~PartitionMaps() {
  for (std::uint32_t i = 0; i < partitions_; ++i) {
    if (std::byte* start = maps_[i].start.load()) ::munmap(start, maps_[i].size.load());
  }
}

#if defined(__linux__) && defined(RWF_NOWAIT)

std::byte* PartitionMaps::mapped(Map& map, int file, std::uint64_t size) const {
  std::byte* start = map.start.load(std::memory_order_acquire);
  if (start != nullptr) return start;
  if (!has_addresses()) return nullptr;
  if (total_.fetch_add(size) + size <= kMostMapped) {
    void* made = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
    if (made != MAP_FAILED) {
      map.size.store(size);
      if (map.start.compare_exchange_strong(start, static_cast<std::byte*>(made))) {
        return static_cast<std::byte*>(made);
      }
      ::munmap(made, size);  // another thread has mapped it meanwhile
    }
  }
  total_.fetch_sub(size);
  return start;
}

std::span<const std::byte> PartitionMaps::resident(std::uint32_t partition, int file,
                                                   std::uint64_t file_size, std::uint64_t offset,
                                                   std::uint64_t size) const {
  // Files are read as wholes: if the kernel has their ends, it most likely has what is between.
  if (!is_cached(file, offset) || !is_cached(file, offset + size - 1)) return {};
  std::byte* start = mapped(maps_[partition], file, file_size);
  if (start == nullptr) return {};
  // Finds what can't be read, which would be a signal later; a read by system calls says why.
  const std::uint64_t before = offset % static_cast<std::uint64_t>(::getpagesize());
  if (::madvise(start + offset - before, size + before, kPopulateRead) != 0) return {};
  return {start + offset, static_cast<std::size_t>(size)};
}

#else

std::span<const std::byte> PartitionMaps::resident(std::uint32_t, int, std::uint64_t, std::uint64_t,
                                                   std::uint64_t) const {
  return {};
}

#endif

}  // namespace pydist::packs
