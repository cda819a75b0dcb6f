#include "packs/stored.hpp"

#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <vector>

#include "io/crc32c.hpp"
#include "packs/codec.hpp"

namespace pydist::packs {

void read_bytes(int partition, const Stored& stored, std::uint64_t offset,
                std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got =
        ::pread(partition, out.data(), out.size(), static_cast<off_t>(stored.offset + offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw PackError(std::generic_category().message(errno));
    if (got == 0) throw PackError("damaged: it was cut short");
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

void read_whole(int partition, const Stored& stored, std::span<std::byte> out) {
  if (out.size() != stored.raw_size) {
    throw PackError("it has " + std::to_string(stored.raw_size) + " bytes, and was read into " +
                    std::to_string(out.size()));
  }
  if (stored.codec == Codec::kRaw) {
    read_bytes(partition, stored, 0, out);
  } else {
    std::vector<std::byte> compressed(stored.stored_size);
    read_bytes(partition, stored, 0, compressed);
    // Before decompression, so that its library sees only what the packer wrote.
    if (io::crc32c(compressed.data(), compressed.size()) != stored.stored_crc) {
      throw PackError("damaged: its stored bytes do not match their checksum");
    }
    decompress(stored.codec, compressed, out);
  }
  if (io::crc32c(out.data(), out.size()) != stored.raw_crc) {
    throw PackError("damaged: it does not match its checksum");
  }
}

}  // namespace pydist::packs
