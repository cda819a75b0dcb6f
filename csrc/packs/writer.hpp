// Writes the files of a pack: partitions, and the index when all of them are complete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "packs/codec.hpp"
#include "packs/format.hpp"
#include "packs/stored.hpp"
#include "packs/system.hpp"

namespace pydist::packs {

// A file of a pack can't be written. Python sees DiskError.
class WriteError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Writes one partition. Its header is written by finish, so a partition whose writer was killed is
// not one. Not thread-safe, except for `read`; several writers may run at once.
class PartitionWriter {
 public:
  // Makes a file, which must not exist.
  PartitionWriter(std::string file, std::uint32_t number, const PackId& id);

  // Appends the bytes that an open file has from its start to its end, compressed if that makes
  // them smaller. Throws PackError if it has not `size` bytes: it is changing.
  Stored append(int source, std::uint64_t size, Compression how);

  // Appends bytes in memory, by the same rules. After an error the partition is as it was before.
  Stored append(std::span<const std::byte> bytes, Compression how);

  // Reads what was appended, before or after `finish`, and compares it with its checksums. Throws
  // PackError.
  void read(const Stored& stored, std::span<std::byte> out) const;

  // Writes the header, flushes all to disk, and returns the size of the file.
  std::uint64_t finish();

 private:
  void write(const void* bytes, std::size_t size, std::uint64_t offset);
  Stored placed(std::uint64_t size) const;
  void store(Stored& stored, std::span<const std::byte> bytes, Compression how);

  std::string file_;
  Descriptor descriptor_;
  PartitionHeader header_{};
  std::uint64_t end_ = sizeof(PartitionHeader);
};

// Collects the entries of an index in breadth-first order: those of one directory after another,
// each directory's sorted by the bytes of their names. Throws PackError for another order.
class IndexWriter {
 public:
  // The root has the number 0.
  IndexWriter(std::uint16_t mode, std::int64_t mtime_ns);

  // Adds an entry below a directory, and returns its number.
  std::uint32_t add(std::uint32_t parent, std::string_view name, EntryKind kind, std::uint16_t mode,
                    std::int64_t mtime_ns);

  // Sets where a file is stored.
  void store(std::uint32_t file, const Stored& stored);

  // The bytes of the index. origin: JSON text that says how the pack was made.
  std::vector<std::byte> bytes(const PackId& id, const std::vector<std::uint64_t>& partitions,
                               std::string_view origin) const;

 private:
  std::vector<Entry> entries_;
  std::string names_;
};

}  // namespace pydist::packs
