// What a path means: a packed entry, a place in the output folder, or something elsewhere.
#pragma once

#include <fcntl.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pydist::preload {

inline constexpr std::size_t kPathSize = 4096;

// The permission bits of the owner, whom a packed file has in every user.
enum Permission : unsigned { kExecute = 0100, kWrite = 0200, kRead = 0400 };
bool permits(std::uint32_t mode, unsigned permissions);
bool permits_search(std::uint32_t mode);  // of a directory, which root may always do

// The meaning of a path, relative to a directory (or AT_FDCWD) as in openat.
class Target {
 public:
  enum class Place {
    kElsewhere,  // the C library gets `directory` and `path`, which can differ from what was given
    kPacked,     // `entry`
    kMissing,    // the last component does not exist in the packed directory `entry`; has `error`,
                 // too
    kFailed,     // the path leads into the mount and fails there with `error`
  };

  Target(int directory, const char* path);
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;

  bool in_pack() const { return place != Place::kElsewhere; }
  bool is_entry() const { return place == Place::kPacked; }
  // Fails a call that wants an existing entry; returns -1.
  int fail() const;

  Place place = Place::kElsewhere;
  std::uint32_t entry = 0;
  int error = 0;
  int directory;
  const char* path;
  bool reached = false;  // the packed directory of the last component was found
  bool slash = false;    // the path ends with a slash: a directory is wanted
  enum class Last { kName, kDot, kDotDot, kMountPoint } last = Last::kMountPoint;  // component
  bool counted = false;  // at or below the mount point

 private:
  void resolve(std::string_view base, std::string_view rest);
  void walk(std::string_view rest);
  void leave(std::string_view rest);
  void rewrite(std::string_view start, std::string_view rest);
  void failed(int reason);

  bool has_left_ = false;  // the mount point: `path` is to be resolved anew
  char text_[kPathSize];   // of a path that differs from the one given
};

// The base of a relative path: the real path of a directory, or of the current one. Empty if there
// is none.
std::string_view base_of(int directory, char (&text)[kPathSize]);

// Writes the visible path of a directory entry, with a null byte. Returns its length, or 0 with
// errno if there is no room.
std::size_t visible_path(std::uint32_t entry, char* text, std::size_t size);

}  // namespace pydist::preload
