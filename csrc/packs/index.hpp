// The index of a pack, mapped into memory: look-ups, listings and metadata.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "packs/format.hpp"

namespace pydist::packs {

// Read-only and thread-safe. Each accessor checks the bounds of what it reads, so an index that was
// not checked can give wrong answers or a PackError, and never reads memory outside of its file.
class Index {
 public:
  // Maps an index in O(1): checks its header and the bounds of its tables, and throws PackError
  // with the reason. The file must not be cut short while it is mapped; packs are replaced by
  // renaming.
  static Index open(const std::string& file);

  // The same of an index in memory, which the caller keeps, aligned to 8 bytes. file: its name in
  // messages.
  static Index view(std::string file, std::span<const std::byte> bytes);

  // Reads everything once, and throws PackError unless the checksum is right, the entries form a
  // tree in the order of format.hpp, and no stored bytes are outside of a partition or overlap.
  void check() const;

  std::uint32_t size() const { return static_cast<std::uint32_t>(entries_.size()); }
  std::uint32_t partitions() const { return static_cast<std::uint32_t>(partitions_.size()); }
  std::uint64_t partition_size(std::uint32_t partition) const;
  const PackId& id() const { return header_->id; }
  std::string_view origin() const { return origin_; }  // JSON text: how the pack was made
  const std::string& file() const { return file_; }

  const Entry& entry(std::uint32_t i) const;
  std::string_view name(std::uint32_t i) const;  // the base name
  std::string path(std::uint32_t i) const;       // relative to the root, which is ""

  // The children of a directory are the entries [first, first + count). Each is checked to name the
  // directory as its parent, so that a walk ends, also one of an index that was not checked.
  struct Range {
    std::uint32_t first;
    std::uint32_t count;
  };
  Range children(std::uint32_t directory) const;

  // The files below a directory, depth first, by name.
  std::vector<std::uint32_t> files(std::uint32_t directory) const;

  // Finds an entry by its path relative to the root, which is "". Components are separated by one
  // '/', without "." and "..". None if there is no such entry, or one before the last is a file.
  std::optional<std::uint32_t> find(std::string_view path) const;
  std::optional<std::uint32_t> child(std::uint32_t directory, std::string_view name) const;

 private:
  Index(std::string file, std::span<const std::byte> bytes,
        std::shared_ptr<const std::byte> mapping);
  std::span<const std::byte> table(const Table& table, std::uint64_t unit, const char* what) const;
  Range range(std::uint32_t directory) const;
  void require_parent(std::uint32_t child, std::uint32_t directory) const;
  void check_entry(std::uint32_t i, std::uint64_t next_child, std::uint64_t next_name) const;
  void check_ranges() const;
  [[noreturn]] void damaged(const std::string& reason) const;

  std::string file_;
  std::span<const std::byte> bytes_;
  std::shared_ptr<const std::byte> mapping_;  // of bytes_; null for a view
  const IndexHeader* header_ = nullptr;
  std::span<const Entry> entries_;
  std::span<const std::uint64_t> partitions_;
  std::string_view names_, origin_;
};

}  // namespace pydist::packs
