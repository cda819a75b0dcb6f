// Compression of files by zstd, lz4 and blosc, whose libraries are opened at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "packs/format.hpp"

namespace pydist::packs {

// Larger files are stored raw: a compressed file is read whole, into memory.
inline constexpr std::uint64_t kLargestCompressed = std::uint64_t{1} << 30;

// How files are compressed. Blosc sorts the bits of values by their weight before it compresses them
// by zstd, which needs the size of a value; what it stores names that size, so that no entry has to.
struct Compression {
  Compression(Codec codec, std::uint8_t item_size = 1) : codec(codec), item_size(item_size) {}
  Codec codec;
  std::uint8_t item_size;  // bytes of a value, at least 1; others than blosc ignore it
};

// The name of a codec: raw, zstd, lz4 or blosc.
const char* name_of(Codec codec);

// Opens the library of a codec; comm::LibraryMissing says which one is missing. Raw needs none.
void require(Codec codec);

// Compresses bytes, of at most kLargestCompressed. The result can be larger than they are.
std::vector<std::byte> compress(Compression how, std::span<const std::byte> raw);

// Decompresses bytes that have exactly the size of `raw`; writes no more than that. Throws
// PackError if they do not have it, or are damaged.
void decompress(Codec codec, std::span<const std::byte> stored, std::span<std::byte> raw);

// Returns the problem with a file's sizes, or an empty string: a raw file has its stored size, and
// a compressed one is smaller than its raw size, by no more than its codec can achieve. So an index
// can't have a reader allocate more than the pack holds times the codec's largest ratio.
std::string fault_of_sizes(const Entry& entry);

}  // namespace pydist::packs
