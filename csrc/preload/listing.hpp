// The listing of a packed directory, as readdir gives it.
#pragma once

#include <dirent.h>

#include <cstdint>
#include <optional>

#include "packs/index.hpp"

namespace pydist::preload {

// A stream of a packed directory. Its first word tells it from a stream of the C library, which
// begins with a descriptor and a lock. Programs have it as a DIR*, from opendir to closedir, and
// use it from one thread at a time, as POSIX asks of them.
struct Listing {
  static constexpr std::uint64_t kMagic = 0x9D15'7A3C'64C9'0B2FU;

  std::uint64_t magic = kMagic;
  int descriptor = -1;      // made when dirfd asks for it, or given to fdopendir; closed with this
  std::uint32_t entry = 0;  // the directory's, in the index
  // As telldir gives it: 0 is ".", 1 is "..", then the children in the order of the index, then, in
  // the root of a mount with one, the output folder.
  long position = 0;
  std::optional<packs::Index::Range> children;  // found once, as that checks them all
  dirent current{};

  // The entry at the position, which is advanced; nullptr at the end, or with errno.
  // The result is `current`, which the next call overwrites.
  dirent* next();
};

// The packed directory that a stream lists, or nullptr: the stream is the C library's.
inline Listing* listing_of(DIR* stream) {
  auto* listing = reinterpret_cast<Listing*>(stream);
  return listing != nullptr && listing->magic == Listing::kMagic ? listing : nullptr;
}

}  // namespace pydist::preload
