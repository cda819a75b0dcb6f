// The stored bytes of one file in a partition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "packs/format.hpp"

namespace pydist::packs {

// Where a partition has a file, in the words of its entry.
struct Stored {
  std::uint64_t offset = sizeof(PartitionHeader);
  std::uint64_t stored_size = 0;
  std::uint64_t raw_size = 0;
  std::uint32_t partition = 0;
  std::uint32_t raw_crc = 0;
  std::uint32_t stored_crc = 0;
  Codec codec = Codec::kRaw;
};

// Stored bytes are not those that were written. The text is the reason alone.
class Damage : public PackError {
 public:
  using PackError::PackError;
};

// Reads stored bytes, from an offset in them on.
using Fetch = std::function<void(std::uint64_t offset, std::span<std::byte> out)>;

// Takes bytes of a file, from an offset in it on.
using Take = std::function<void(std::uint64_t offset, std::span<const std::byte> bytes)>;

// Bytes of a file that are read and compared at a time: the CPU has them in its cache.
inline constexpr std::size_t kCachedPiece = std::size_t{128} << 10;

// Reads a whole file into `out`, of its raw size, and compares it with its checksums; throws
// Damage. `fetch` is called for up to `piece` bytes at a time.
void read_whole(const Stored& stored, const Fetch& fetch, std::span<std::byte> out,
                std::size_t piece = kCachedPiece);

// Copies a whole file that is stored raw into `out`, of its size, and compares it with its
// checksum; throws Damage.
void copy_whole(const Stored& stored, std::span<const std::byte> bytes, std::span<std::byte> out);

// The same as read_whole, but gives the bytes away, in order, in pieces: the last one before the
// file is compared.
void pass_whole(const Stored& stored, const Fetch& fetch, const Take& take,
                std::size_t piece = kCachedPiece);

}  // namespace pydist::packs
