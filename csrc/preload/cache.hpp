// The cache: copies of packed files that stay in memory for all processes of a mount.
//
// They are files beside the folders of directories, named by the entry's number ("f17"), of a total
// size up to the mount's `cache`. None is ever removed: programs read data sets in a new order in
// each epoch, which would soon need what was removed for something else.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string_view>

namespace pydist::preload {

// Opens the copy of a file for reading, and makes it if there is room. `flags` are those of open,
// for a file that exists. Returns -1 if there is no copy: the caller makes another one.
int open_cached(std::uint32_t entry, int flags);

// The entry whose copy has a path, or -1.
std::int64_t cached_entry(std::string_view path);

// Whether a mode can be that of a copy, which has the sticky bit, and no ordinary file.
inline bool is_cached(mode_t mode) { return (mode & 01333) == 01000; }

}  // namespace pydist::preload
