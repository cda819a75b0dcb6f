// The stored bytes of one file in a partition.
#pragma once

#include <cstddef>
#include <cstdint>
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

// Reads stored bytes of an open partition, from an offset in them on. Throws PackError with the
// reason alone, as does the next one.
void read_bytes(int partition, const Stored& stored, std::uint64_t offset,
                std::span<std::byte> out);

// Reads a whole file and compares it with its checksums. The size of `out` is its raw size.
void read_whole(int partition, const Stored& stored, std::span<std::byte> out);

}  // namespace pydist::packs
