// CRC-32C (Castagnoli), the checksum of iSCSI, ext4 and RFC 3720.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pydist::io {

// Checksum of `size` bytes at `data`. To continue over several pieces, pass the previous result as
// `crc`: crc32c(b, m, crc32c(a, n)) is the checksum of a followed by b.
std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc = 0);

// Copies `size` bytes, and returns their checksum as crc32c does. For copies that are larger than
// the caches: each byte is loaded once, and not kept there. `to` and `from` must not overlap.
std::uint32_t crc32c_copy(void* to, const void* from, std::size_t size, std::uint32_t crc = 0);

// The paths for CPUs without carry-less products of 512 bits, and those without a CRC instruction:
// public for tests. The first takes tables where there is no instruction.
std::uint32_t crc32c_by_instruction(const void* data, std::size_t size, std::uint32_t crc = 0);
std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t crc = 0);

}  // namespace pydist::io
