// Opening of packed files: what flags mean on a read-only file system, and where the bytes come
// from.
#pragma once

#include <sys/types.h>

#include "preload/paths.hpp"

namespace pydist::preload {

// Opens what a target means. `flags` are those of open. Returns -1 with errno if that fails.
int open_target(const Target& target, int flags, mode_t mode);

// Opens a packed file as a copy, also a large one: for those who need all of it.
int open_whole(const Target& target, int flags);

// Whether a path can be a link to a descriptor, as /dev/stdin is.
bool can_be_link(const char* path);

// The hook of openat, for calls within this library.
int open_path(int directory, const char* path, int flags, mode_t mode);

}  // namespace pydist::preload
