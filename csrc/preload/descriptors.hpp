// Descriptors of packed files and directories. The kernel holds all of their state.
//
// - A copy is a sealed memfd with the bytes of a file, opened read-only: read, pread, lseek, mmap,
//   dup, fork and exec are the kernel's own. A small one can be a file in the cache instead.
// - A file in place is an empty memfd of the file's size, opened write-only. It holds the position;
//   the bytes are read from the partition by hooks. What is not hooked fails with EBADF.
// - A file opened with O_PATH is an empty memfd, opened so.
// - A directory is an O_PATH descriptor of an empty folder whose name is the entry's number.
//
// The names of these files identify them: there is no table that a dup, a vfork, an exec or a close
// within the C library could make wrong.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <cstdint>
#include <string_view>

namespace pydist::preload {

enum class Held { kOther, kCopy, kInPlace, kPathOnly, kDirectory };

struct OpenDescriptor {
  Held held = Held::kOther;
  std::uint32_t entry = 0;

  bool is_packed() const { return held != Held::kOther; }
};

// Flags of open that were about the path, and are not for the copy of a packed file.
inline constexpr int kOfPaths =
    O_CREAT | O_EXCL | O_TRUNC | O_NOFOLLOW | O_DIRECTORY | O_NOATIME | O_DIRECT;

// What a descriptor is; costs a readlink.
OpenDescriptor identify(int descriptor);

// The same, given the name that its link in /proc has.
OpenDescriptor identify_name(const char* name);

// The same, given its fstat: a file that can't be packed costs nothing.
OpenDescriptor identify(int descriptor, const struct stat& status);

// The decimal number that a text is, or -1.
std::int64_t number_of(std::string_view text);

// The directory entry whose folder has a path, or -1.
std::int64_t directory_of(std::string_view path);

// Makes descriptors. `flags` are those of open. They return -1 with errno if that fails.
int open_copy(std::uint32_t entry, int flags);
int open_in_place(std::uint32_t entry, int flags);
int open_path_only(std::uint32_t entry, int flags);
// Of a copy of a part of a raw file, to be mapped.
int open_part(std::uint32_t entry, std::uint64_t offset, std::size_t size);
int open_directory(std::uint32_t entry, int flags);

// Writes the content of a file into an empty one. False with errno if that fails.
bool fill(int empty, std::uint32_t entry);

// The path of the folder of a directory entry, which is made. False with errno if that fails.
bool make_folder(std::uint32_t entry, char (&path)[4096]);

// The library's own descriptors get high numbers, and the program can't close them: some programs
// close all that they know nothing of, and others expect certain numbers to be free.
int keep_own(int descriptor);
bool is_own(int descriptor);
void release_own(int descriptor);

}  // namespace pydist::preload
