// Maps of partitions, from which large files are copied while the page cache has them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace pydist::packs {

// Bytes of a file from which on it is copied from a map: less stays in the caches of a CPU.
inline constexpr std::uint64_t kMappedFile = std::uint64_t{4} << 20;

// The partitions of a folder, each mapped at its first use. A read by system calls copies a file,
// and loads the copy again for the checksum; from a map, one loop does both. Thread-safe without
// locks.
class PartitionMaps {
 public:
  explicit PartitionMaps(std::uint32_t partitions);
  ~PartitionMaps();
  PartitionMaps(const PartitionMaps&) = delete;
  PartitionMaps& operator=(const PartitionMaps&) = delete;

  // Bytes of a partition, whose open file has `file_size` bytes. Empty if they should be read by
  // system calls instead: they are not in memory, or can't be mapped. No access to the result
  // fails, unless the file is cut short at that moment.
  std::span<const std::byte> resident(std::uint32_t partition, int file, std::uint64_t file_size,
                                      std::uint64_t offset, std::uint64_t size) const;

 private:
  struct Map {
    std::atomic<std::byte*> start{nullptr};
    std::atomic<std::uint64_t> size{0};
  };

  std::byte* mapped(Map& map, int file, std::uint64_t size) const;

  std::uint32_t partitions_;
  std::unique_ptr<Map[]> maps_;
  mutable std::atomic<std::uint64_t> total_{0};  // bytes that are mapped
};

}  // namespace pydist::packs
