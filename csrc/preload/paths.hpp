// What a path means: a packed entry, a place in the output folder, or something elsewhere.
#pragma once

#include <fcntl.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pydist::preload {

// PATH_MAX of Linux: bytes of a path, with its null byte.
inline constexpr std::size_t kPathSize = 4096;

// The permission bits of the owner, whom a packed file has in every user.
enum Permission : unsigned { kExecute = 0100, kWrite = 0200, kRead = 0400 };
// Whether all of `permissions` are given. Root has them, except to execute what nobody may.
bool permits(std::uint32_t mode, unsigned permissions);
bool permits_search(std::uint32_t mode);  // of a directory, which root may always do

// The meaning of a path, relative to a directory (or AT_FDCWD) as in openat.
//
// Made at the start of each hook that takes a path, on its stack: it holds a buffer of kPathSize.
// The path is followed component by component, "." and ".." included, but not through links: packs
// have none, and a link elsewhere that leads to the mount point is not recognized. Leaves errno as
// it was. For calls of this library itself (Inside), every path is kElsewhere.
class Target {
 public:
  enum class Place {
    kElsewhere,  // the C library gets `directory` and `path`, which can differ from what was given
    kPacked,     // `entry`
    kMissing,    // the last component does not exist in the packed directory `entry`; has `error`,
                 // too
    kFailed,     // the path leads into the mount and fails there with `error`
  };

  // `path` may be null. It must outlive the target, whose `path` it stays unless it was rewritten.
  Target(int directory, const char* path);
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;

  bool in_pack() const { return place != Place::kElsewhere; }
  bool is_entry() const { return place == Place::kPacked; }
  // Fails a call that wants an existing entry; returns -1.
  int fail() const;

  Place place = Place::kElsewhere;
  std::uint32_t entry = 0;  // in the index: what was found; kMissing: the directory without it
  int error = 0;            // for errno; 0 for kElsewhere and kPacked
  int directory;            // to be passed on for kElsewhere, with `path`
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

// The visible path of a real one if that is a stand-in for a missing parent of the mount point, or
// in one. Else empty.
std::string_view below_stand_ins(std::string_view real);

// Writes the visible path of a directory entry, with a null byte. Returns its length, or 0 with
// errno if there is no room.
std::size_t visible_path(std::uint32_t entry, char* text, std::size_t size);

}  // namespace pydist::preload
