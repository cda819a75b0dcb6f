// The folder of a pack, open for reading.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "packs/index.hpp"
#include "packs/maps.hpp"
#include "packs/protocol.hpp"
#include "packs/remote.hpp"
#include "packs/stored.hpp"

namespace pydist::packs {

// An index and its partitions, which are opened at their first use. Thread-safe without locks, so
// also usable in the child of a fork. All functions throw PackError that names file and reason, or
// UsageError if the process may open no more files.
class Folder {
 public:
  explicit Folder(const std::string& path);

  // Partitions that are not in the folder are read from servers: see remote.hpp.
  Folder(const std::string& path, const std::vector<std::string>& servers, const Secret& secret);
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const Index& index() const { return index_; }
  const std::string& path() const { return path_; }

  // The entry of a file, after a check that its partition is there and holds all of it. Throws for
  // a directory.
  const Entry& file(std::uint32_t entry) const;

  // Where its partition has a file, checked as by `file`.
  Stored stored(std::uint32_t entry) const;

  // Reads a whole file and compares it with its checksum. The size of `out` is the entry's raw
  // size.
  void read(std::uint32_t entry, std::span<std::byte> out) const;

  // The same for a file of any size, whose bytes are given to `take` in pieces. It is compared
  // after the last one.
  void pass(std::uint32_t entry, const Take& take) const;

  // Reads a part of a file that is stored raw, without its checksum. Returns the number of bytes:
  // the size of `out`, or less at the end of the file.
  std::size_t pread(std::uint32_t entry, std::uint64_t offset, std::span<std::byte> out) const;

  // Reads a whole file, and compares all of its checksums.
  void check(std::uint32_t entry) const;

  // Whether the folder has a partition, or its reads would go to the servers.
  bool is_here(std::uint32_t partition) const;

  // The open file of a partition whose header was checked; it remains this folder's. Throws for one
  // that is not here.
  int partition_fd(std::uint32_t partition) const;

 private:
  void read_stored(std::uint32_t entry, std::uint64_t offset, std::span<std::byte> out) const;
  // The bytes of a large raw file that is here and in memory, else nothing.
  std::span<const std::byte> resident(const Entry& entry) const;
  std::size_t piece_of(const Entry& entry) const;  // the most bytes that are read at a time
  [[noreturn]] void damaged(std::uint32_t entry, const std::string& reason) const;

  std::string path_;
  Index index_;
  std::unique_ptr<std::atomic<int>[]> descriptors_;  // or kClosed, kElsewhere
  PartitionMaps maps_;
  std::unique_ptr<const Remote> remote_;
};

}  // namespace pydist::packs
