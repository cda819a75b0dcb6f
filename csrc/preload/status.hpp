// What stat says of packed entries.
#pragma once

#include <sys/stat.h>

#include <cstdint>

namespace pydist::preload {

// Fills a stat. Returns false with errno if the entry can't be read.
bool fill_status(std::uint32_t entry, struct stat& status);

// The hook of fstatat, for calls within this library.
int status_of(int directory, const char* path, struct stat* status, int flags);

// The inode number of an entry; entry 0 must not have the number 0.
inline ino_t inode_of(std::uint32_t entry) { return ino_t{entry} + 1; }

}  // namespace pydist::preload
