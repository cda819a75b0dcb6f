// Compression of files by zstd and lz4, whose libraries are opened at run time.
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

// The name of a codec: raw, zstd or lz4.
const char* name_of(Codec codec);

// Opens the library of a codec; comm::LibraryMissing says which one is missing. Raw needs none.
void require(Codec codec);

// Compresses bytes, of at most kLargestCompressed. The result can be larger than they are.
std::vector<std::byte> compress(Codec codec, std::span<const std::byte> raw);

// Decompresses bytes that have exactly the size of `raw`; writes no more than that. Throws
// PackError if they do not have it, or are damaged.
void decompress(Codec codec, std::span<const std::byte> stored, std::span<std::byte> raw);

// Returns the problem with a file's sizes, or an empty string: a raw file has its stored size, and
// a compressed one is smaller than its raw size, by no more than its codec can achieve. So an index
// can't have a reader allocate more than the pack holds times the codec's largest ratio.
std::string fault_of_sizes(const Entry& entry);

}  // namespace pydist::packs
