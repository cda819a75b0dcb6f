// The bytes of a pack: the header of a partition, and the header and entries of an index.
//
// A pack folder holds partitions (part-00000.pack, ...) with the stored bytes of many files, and
// one index (index.pdx) with all metadata. Integers are little-endian.
//
//   partition:  header | stored bytes of files, each start aligned to 64 bytes (large files: 4096)
//   index:      header | entries | sizes of partitions (u64) | names | origin (JSON text)
//
// Entry 0 is the root directory. Entries are in breadth-first order, and the children of a
// directory are contiguous and sorted by the bytes of their names. So a listing is a range, a
// look-up is one binary search per component, and one pass proves that the entries form a tree.
//
// Structs are written and mapped as they are in memory: the fields in this order, without padding,
// each aligned to its size. The static_asserts at the end guard the layout. A change of it needs
// another kVersion, which readers refuse.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace pydist::packs {

// A pack, or a file to be packed, is missing, damaged or not as expected. Python sees DataError.
class PackError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The numbers are stored in files: they must not change.
enum class EntryKind : std::uint8_t { kFile = 0, kDirectory = 1 };
enum class Codec : std::uint8_t { kRaw = 0, kZstd = 1, kLz4 = 2, kBlosc = 3 };

using Magic = std::array<char, 8>;
using PackId = std::array<std::byte, 16>;  // random, equal in all files of a pack

inline constexpr Magic kPartitionMagic = {'P', 'D', 'P', 'A', 'C', 'K', '0', '1'};
inline constexpr Magic kIndexMagic = {'P', 'D', 'I', 'N', 'D', 'E', 'X', '1'};
inline constexpr std::uint32_t kVersion = 1;
// Bytes. Files that are not large start at a multiple of this: the size of a cache line, and of the
// header.
inline constexpr std::uint64_t kAlignment = 64;
// A large file starts at the border of a page, so that it can be mapped where it is stored.
inline constexpr std::uint64_t kLargeFile = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kPage = 4096;
inline constexpr std::uint16_t kModeBits = 07777;
inline constexpr const char* kIndexName = "index.pdx";

// The name of a partition's file: part-00000.pack.
inline std::string partition_name(std::uint32_t number) {
  const std::string digits = std::to_string(number);
  return "part-" + std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits + ".pack";
}

// The first 64 bytes of a partition. Written last: a partition whose writer was killed has none.
struct PartitionHeader {
  Magic magic;                      // kPartitionMagic
  std::uint32_t version;            // kVersion
  std::uint32_t number;             // as in the name of its file
  PackId id;                        // as in the index
  std::uint64_t file_size;          // bytes, with this header
  std::array<std::byte, 20> zeros;  // reserved, written as 0
  std::uint32_t crc;                // CRC-32C of the 60 bytes before
};

// A table of the index.
struct Table {
  std::uint64_t offset;  // bytes from the start of the file
  std::uint64_t size;    // bytes
};

// The first 128 bytes of an index. Opening an index checks this header alone: its checksum and the
// bounds of the tables. The checksum of the body is compared by Index::check.
struct IndexHeader {
  Magic magic;                // kIndexMagic
  std::uint32_t version;      // kVersion
  std::uint32_t header_size;  // bytes of this struct
  PackId id;
  std::uint64_t entries;     // their number
  std::uint64_t partitions;  // their number
  Table entry_table;         // Entry for each entry
  Table partition_table;     // u64 for each partition: bytes of its file
  Table names;               // base names without separators, in the order of the entries
  Table origin;              // JSON text: how the pack was made
  std::uint64_t file_size;   // bytes of the index
  std::uint32_t body_crc;    // CRC-32C of all bytes after this header
  std::uint32_t crc;         // CRC-32C of the 124 bytes before
};

// A file or a directory. A directory's codec, raw size, partition and checksums are 0.
struct Entry {
  std::uint64_t name_offset;  // bytes from the start of the table of names
  std::uint64_t offset;       // file: in its partition; directory: its first child
  std::uint64_t stored_size;  // file: in its partition; directory: the number of its children
  std::uint64_t raw_size;     // bytes of the file, before compression
  std::int64_t mtime_ns;      // since 1970
  std::uint32_t name_size;    // bytes of the base name
  std::uint32_t partition;
  std::uint32_t raw_crc;     // CRC-32C of the raw bytes
  std::uint32_t stored_crc;  // CRC-32C of the stored bytes
  std::uint32_t parent;      // of the root: 0
  EntryKind kind;
  Codec codec;
  std::uint16_t mode;  // permission bits
};

static_assert(std::endian::native == std::endian::little, "packs are mapped as they are stored");
static_assert(sizeof(PartitionHeader) == 64 && std::is_trivially_copyable_v<PartitionHeader>);
static_assert(sizeof(IndexHeader) == 128 && std::is_trivially_copyable_v<IndexHeader>);
static_assert(sizeof(Entry) == 64 && std::is_trivially_copyable_v<Entry>);
static_assert(offsetof(PartitionHeader, crc) == 60 && offsetof(IndexHeader, crc) == 124);
static_assert(offsetof(Entry, mode) == 62);

}  // namespace pydist::packs
