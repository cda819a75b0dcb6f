// Hooks of stat and its kin. Packed entries have a device of their own, and their number as inode,
// by path as by descriptor: programs compare both.
#include "preload/status.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "preload/descriptors.hpp"
#include "preload/hook.hpp"
#include "preload/mount.hpp"
#include "preload/paths.hpp"
#include "preload/profile.hpp"

namespace pydist::preload {
namespace {

// The hooks of 32 and of 64 bits are the same functions.
static_assert(sizeof(off_t) == 8 && sizeof(struct stat) == sizeof(struct stat64));

constexpr unsigned kMajor = 0xFD5;  // the kernel gives major numbers below 512
constexpr std::int64_t kSecond = 1'000'000'000;
constexpr unsigned kBlock = 4096;

int kernel_status(int directory, const char* path, struct stat* status, int flags) {
  return static_cast<int>(syscall(SYS_newfstatat, directory, path, status, flags));
}

timespec time_of(std::int64_t nanoseconds) {
  const std::int64_t rest = ((nanoseconds % kSecond) + kSecond) % kSecond;
  return {(nanoseconds - rest) / kSecond, static_cast<long>(rest)};
}

// Whether a path is empty and the call means the descriptor itself.
bool of_descriptor(const char* path, int flags) {
  return (flags & AT_EMPTY_PATH) != 0 && (path == nullptr || *path == 0);
}

int status_of_descriptor(int descriptor, struct stat* status) {
  Call call(CallKind::kStat, tracked(descriptor));
  const int result = static_cast<int>(syscall(SYS_fstat, descriptor, status));
  if (result != 0 || Inside::active()) return call(result);
  const OpenDescriptor known = identify(descriptor, *status);
  return call(known.is_packed() && !fill_status(known.entry, *status) ? -1 : 0);
}

void fill_statx(const struct stat& from, struct statx& to) {
  std::memset(&to, 0, sizeof to);
  to.stx_mask = STATX_BASIC_STATS;
  to.stx_blksize = static_cast<std::uint32_t>(from.st_blksize);
  to.stx_nlink = static_cast<std::uint32_t>(from.st_nlink);
  to.stx_uid = from.st_uid;
  to.stx_gid = from.st_gid;
  to.stx_mode = static_cast<std::uint16_t>(from.st_mode);
  to.stx_ino = from.st_ino;
  to.stx_size = static_cast<std::uint64_t>(from.st_size);
  to.stx_blocks = static_cast<std::uint64_t>(from.st_blocks);
  to.stx_mtime.tv_sec = from.st_mtim.tv_sec;
  to.stx_mtime.tv_nsec = static_cast<std::uint32_t>(from.st_mtim.tv_nsec);
  to.stx_atime = to.stx_ctime = to.stx_mtime;
  to.stx_dev_major = major(from.st_dev);
  to.stx_dev_minor = minor(from.st_dev);
}

}  // namespace

bool fill_status(std::uint32_t entry, struct stat& status) {
  return attempt(false, [&] {
    const packs::Index& index = pack().index();
    const packs::Entry& found = index.entry(entry);
    const bool directory = found.kind == packs::EntryKind::kDirectory;
    std::uint16_t number;
    std::memcpy(&number, index.id().data(), sizeof number);
    std::memset(&status, 0, sizeof status);
    status.st_dev = makedev(kMajor, number);
    status.st_ino = inode_of(entry);
    status.st_mode = (directory ? S_IFDIR : S_IFREG) | found.mode;
    status.st_nlink = 1;  // of a directory: the number of its directories is unknown
    status.st_uid = geteuid();
    status.st_gid = getegid();
    status.st_size = static_cast<off_t>(directory ? kBlock : found.raw_size);
    status.st_blksize = kBlock;
    status.st_blocks = (status.st_size + kBlock - 1) / kBlock * (kBlock / 512);  // as on disk
    status.st_mtim = status.st_atim = status.st_ctim = time_of(found.mtime_ns);
    return true;
  });
}

int status_of(int directory, const char* path, struct stat* status, int flags) {
  if (of_descriptor(path, flags)) {
    const bool current = directory == AT_FDCWD;
    return current ? status_of(AT_FDCWD, ".", status, 0) : status_of_descriptor(directory, status);
  }
  const Target target(directory, path);
  Call call(CallKind::kStat, target.counted);
  if (!target.in_pack()) return call(kernel_status(target.directory, target.path, status, flags));
  if (!target.is_entry()) return call(target.fail());
  return call(fill_status(target.entry, *status) ? 0 : -1);
}

PYDIST_HOOK(int, fstatat, int directory, const char* path, struct stat* status, int flags) {
  return status_of(directory, path, status, flags);
}
PYDIST_ALIAS(fstatat64, fstatat);

PYDIST_HOOK(int, stat, const char* path, struct stat* status) {
  return status_of(AT_FDCWD, path, status, 0);
}
PYDIST_ALIAS(stat64, stat);

PYDIST_HOOK(int, lstat, const char* path, struct stat* status) {
  return status_of(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}
PYDIST_ALIAS(lstat64, lstat);

PYDIST_HOOK(int, fstat, int descriptor, struct stat* status) {
  return status_of_descriptor(descriptor, status);
}
PYDIST_ALIAS(fstat64, fstat);

// The forms of programs that were linked with glibc before 2.33.
PYDIST_HOOK(int, __xstat, int, const char* path, struct stat* status) {
  return status_of(AT_FDCWD, path, status, 0);
}
PYDIST_ALIAS(__xstat64, __xstat);

PYDIST_HOOK(int, __lxstat, int, const char* path, struct stat* status) {
  return status_of(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}
PYDIST_ALIAS(__lxstat64, __lxstat);

PYDIST_HOOK(int, __fxstat, int, int descriptor, struct stat* status) {
  return status_of_descriptor(descriptor, status);
}
PYDIST_ALIAS(__fxstat64, __fxstat);

PYDIST_HOOK(int, __fxstatat, int, int directory, const char* path, struct stat* status, int flags) {
  return status_of(directory, path, status, flags);
}
PYDIST_ALIAS(__fxstatat64, __fxstatat);

PYDIST_HOOK(int, statx, int directory, const char* path, int flags, unsigned mask,
            struct statx* status) {
  struct stat packed;
  if (of_descriptor(path, flags)) {
    Call call(CallKind::kStat, tracked(directory));
    struct stat known;
    const int result = real_statx(directory, path, flags, mask, status);
    if (result != 0 || directory == AT_FDCWD) return call(result);
    known.st_mode = status->stx_mode;
    known.st_nlink = status->stx_nlink;
    const OpenDescriptor held = identify(directory, known);
    if (!held.is_packed()) return call(result);
    if (!fill_status(held.entry, packed)) return call(-1);
    fill_statx(packed, *status);
    return call(0);
  }
  const Target target(directory, path);
  Call call(CallKind::kStat, target.counted);
  if (!target.in_pack())
    return call(real_statx(target.directory, target.path, flags, mask, status));
  if (!target.is_entry()) return call(target.fail());
  if (!fill_status(target.entry, packed)) return call(-1);
  fill_statx(packed, *status);
  return call(0);
}

}  // namespace pydist::preload
