// Reading of a file from its stored bytes, with its checksums.
#include "packs/stored.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include "io/crc32c.hpp"
#include "packs/codec.hpp"

namespace pydist::packs {
namespace {

// Reads stored bytes and returns their checksum, which is that of bytes in the CPU's cache.
std::uint32_t read_stored(const Fetch& fetch, std::size_t piece, std::span<std::byte> out) {
  std::uint32_t crc = 0;
  for (std::size_t done = 0; done < out.size();) {
    const std::span<std::byte> part = out.subspan(done, std::min(piece, out.size() - done));
    fetch(done, part);
    crc = io::crc32c(part.data(), part.size(), crc);
    done += part.size();
  }
  return crc;
}

void require_same(std::uint32_t crc, const Stored& stored) {
  if (crc != stored.raw_crc) throw Damage("it does not match its checksum");
}

void read_compressed(const Stored& stored, const Fetch& fetch, std::size_t piece,
                     std::span<std::byte> out) {
  std::vector<std::byte> bytes(stored.stored_size);
  // Before decompression, so that its library sees only what the packer wrote.
  if (read_stored(fetch, piece, bytes) != stored.stored_crc) {
    throw Damage("its stored bytes do not match their checksum");
  }
  try {
    decompress(stored.codec, bytes, out);
  } catch (const PackError& error) {
    throw Damage(error.what());
  }
}

}  // namespace

void read_whole(const Stored& stored, const Fetch& fetch, std::span<std::byte> out,
                std::size_t piece) {
  std::uint32_t crc;
  if (stored.codec == Codec::kRaw) {
    crc = read_stored(fetch, piece, out);
  } else {
    read_compressed(stored, fetch, piece, out);
    crc = io::crc32c(out.data(), out.size());
  }
  require_same(crc, stored);
}

void copy_whole(const Stored& stored, std::span<const std::byte> bytes, std::span<std::byte> out) {
  require_same(io::crc32c_copy(out.data(), bytes.data(), out.size()), stored);
}

void pass_whole(const Stored& stored, const Fetch& fetch, const Take& take, std::size_t piece) {
  const std::uint64_t size = stored.raw_size;
  const auto room = static_cast<std::size_t>(
      stored.codec == Codec::kRaw ? std::min<std::uint64_t>(size, piece) : size);
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(room);
  const std::span<std::byte> bytes(memory.get(), room);
  if (stored.codec != Codec::kRaw) {
    read_whole(stored, fetch, bytes, piece);
    return take(0, bytes);
  }
  std::uint32_t crc = 0;
  for (std::uint64_t done = 0; done < size;) {
    const auto part =
        bytes.first(static_cast<std::size_t>(std::min<std::uint64_t>(room, size - done)));
    fetch(done, part);
    crc = io::crc32c(part.data(), part.size(), crc);
    take(done, part);
    done += part.size();
  }
  require_same(crc, stored);
}

}  // namespace pydist::packs
