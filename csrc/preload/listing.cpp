// Hooks of directory streams: ".", "..", the entries of the pack by name, and the output folder.
#include "preload/listing.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>

#include "preload/descriptors.hpp"
#include "preload/hook.hpp"
#include "preload/mount.hpp"
#include "preload/paths.hpp"
#include "preload/profile.hpp"
#include "preload/status.hpp"

namespace pydist::preload {
namespace {

// The result of opendir and fdopendir that fail.
DIR* failed(int error) {
  errno = error;
  return nullptr;
}

// descriptor: the one given to fdopendir, which the listing then owns, or -1. Deleted by closedir.
DIR* make_listing(std::uint32_t entry, int descriptor) {
  auto* made = new (std::nothrow) Listing;
  if (made == nullptr) return failed(ENOMEM);
  made->entry = entry;
  made->descriptor = descriptor;
  struct stat status;
  if (profiling() && fill_status(entry, status)) count_file(status);
  return reinterpret_cast<DIR*>(made);
}

// Refuses what the kernel refuses: packed directories keep their permissions.
DIR* open_listing(const Target& target) {
  if (!target.is_entry()) return target.fail(), nullptr;
  struct stat status;
  if (!fill_status(target.entry, status)) return nullptr;
  if (!S_ISDIR(status.st_mode)) return failed(ENOTDIR);
  if (!permits(status.st_mode, kRead)) return failed(EACCES);
  return make_listing(target.entry, -1);
}

// next: the position of the following entry, to which d_off takes seekdir. Names longer than 255
// bytes, which an index can have, are cut.
void set(dirent& to, ino_t inode, unsigned char type, std::string_view name, long next) {
  to.d_ino = inode;
  to.d_off = next;
  to.d_type = type;
  const std::size_t size = std::min(name.size(), sizeof to.d_name - 1);
  std::memcpy(to.d_name, name.data(), size);
  to.d_name[size] = 0;
  const std::size_t used = offsetof(dirent, d_name) + size + 1;
  to.d_reclen = static_cast<unsigned short>((used + 7) / 8 * 8);
}

}  // namespace

dirent* Listing::next() {
  return attempt(static_cast<dirent*>(nullptr), [&]() -> dirent* {
    const packs::Index& index = pack().index();
    if (!children) children = index.children(entry);
    const long at = position - 2;
    if (at < 0) {
      const std::uint32_t shown = position == 0 ? entry : index.entry(entry).parent;
      set(current, inode_of(shown), DT_DIR, position == 0 ? "." : "..", position + 1);
    } else if (at < static_cast<long>(children->count)) {
      const std::uint32_t child = children->first + static_cast<std::uint32_t>(at);
      const bool directory = index.entry(child).kind == packs::EntryKind::kDirectory;
      set(current, inode_of(child), directory ? DT_DIR : DT_REG, index.name(child), position + 1);
    } else if (at == static_cast<long>(children->count) && entry == 0 && !mount().output.empty()) {
      struct stat status{};
      ::stat(mount().output_target.data(), &status);
      set(current, status.st_ino, DT_DIR, mount().output, position + 1);
    } else {
      return nullptr;
    }
    ++position;
    return &current;
  });
}

PYDIST_HOOK(DIR*, opendir, const char* path) {
  const Target target(AT_FDCWD, path);
  Call call(CallKind::kList, target.counted);
  if (target.in_pack()) return call(open_listing(target));
  DIR* opened = call(real_opendir(target.path));
  struct stat status;
  if (opened != nullptr && target.counted && profiling() && ::fstat(::dirfd(opened), &status) == 0)
    count_file(status);
  return opened;
}

PYDIST_HOOK(DIR*, fdopendir, int descriptor) {
  const OpenDescriptor known = Inside::active() ? OpenDescriptor{} : identify(descriptor);
  Call call(CallKind::kList, known.is_packed() || tracked(descriptor));
  if (!known.is_packed()) return call(real_fdopendir(descriptor));
  if (known.held != Held::kDirectory) return call(failed(ENOTDIR));
  return call(make_listing(known.entry, descriptor));
}

PYDIST_HOOK(dirent*, readdir, DIR* stream) {
  Listing* listing = listing_of(stream);
  return listing == nullptr ? real_readdir(stream) : listing->next();
}
PYDIST_ALIAS(readdir64, readdir);

// The only one of these that returns its error, and leaves errno as it was.
PYDIST_HOOK(int, readdir_r, DIR* stream, dirent* entry, dirent** result) {
  Listing* listing = listing_of(stream);
  if (listing == nullptr) return real_readdir_r(stream, entry, result);
  const int before = errno;
  errno = 0;
  const dirent* next = listing->next();
  const int error = errno;
  errno = before;
  *result = next == nullptr ? nullptr : entry;
  if (next != nullptr) std::memcpy(entry, next, next->d_reclen);
  return error;
}
PYDIST_ALIAS(readdir64_r, readdir_r);

PYDIST_HOOK(void, rewinddir, DIR* stream) {
  Listing* listing = listing_of(stream);
  if (listing == nullptr) return real_rewinddir(stream);
  listing->position = 0;
}

// Positions are numbers of entries, so that a program may go back to any of them.
PYDIST_HOOK(long, telldir, DIR* stream) {
  const Listing* listing = listing_of(stream);
  return listing == nullptr ? real_telldir(stream) : listing->position;
}

PYDIST_HOOK(void, seekdir, DIR* stream, long position) {
  Listing* listing = listing_of(stream);
  if (listing == nullptr) return real_seekdir(stream, position);
  listing->position = std::max(position, 0L);
}

// A listing by path needs no descriptor until a program asks for one, as for fstatat or fchdir.
PYDIST_HOOK(int, dirfd, DIR* stream) {
  Listing* listing = listing_of(stream);
  if (listing == nullptr) return real_dirfd(stream);
  if (listing->descriptor < 0) listing->descriptor = open_directory(listing->entry, O_CLOEXEC);
  return listing->descriptor;
}

PYDIST_HOOK(int, closedir, DIR* stream) {
  Listing* listing = listing_of(stream);
  if (listing == nullptr) return real_closedir(stream);
  const int descriptor = listing->descriptor;
  listing->magic = 0;
  delete listing;
  return descriptor < 0 ? 0 : ::close(descriptor);
}

}  // namespace pydist::preload
