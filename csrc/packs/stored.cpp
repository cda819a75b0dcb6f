// Reading of a file from its stored bytes, with its checksums.
#include "packs/stored.hpp"

#include <vector>

#include "io/crc32c.hpp"
#include "packs/codec.hpp"

namespace pydist::packs {
namespace {

void read_compressed(const Stored& stored, const Fetch& fetch, std::span<std::byte> out) {
  std::vector<std::byte> bytes(stored.stored_size);
  fetch(0, bytes);
  // Before decompression, so that its library sees only what the packer wrote.
  if (io::crc32c(bytes.data(), bytes.size()) != stored.stored_crc) {
    throw Damage("its stored bytes do not match their checksum");
  }
  try {
    decompress(stored.codec, bytes, out);
  } catch (const PackError& error) {
    throw Damage(error.what());
  }
}

}  // namespace

void read_whole(const Stored& stored, const Fetch& fetch, std::span<std::byte> out) {
  if (stored.codec == Codec::kRaw) {
    fetch(0, out);
  } else {
    read_compressed(stored, fetch, out);
  }
  if (io::crc32c(out.data(), out.size()) != stored.raw_crc) {
    throw Damage("it does not match its checksum");
  }
}

}  // namespace pydist::packs
