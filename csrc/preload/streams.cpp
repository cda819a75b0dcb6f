// Hooks of fopen and its kin. The C library reads a stream by calls of its own that no hook sees,
// so a stream of a file in place or of a directory (or, where calls are counted, of any file below
// the mount point) is made by fopencookie and reads by hooks.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "preload/descriptors.hpp"
#include "preload/hook.hpp"
#include "preload/mount.hpp"
#include "preload/open.hpp"
#include "preload/profile.hpp"

namespace pydist::preload {
namespace {

// The descriptors of streams made by fopencookie, whose fileno is unknown to the C library.
struct Stream {
  std::atomic<bool> used;
  std::atomic<FILE*> file;
  int descriptor;
};
constexpr std::size_t kStreams = 4096;
Stream streams[kStreams];

ssize_t read_stream(void* cookie, char* bytes, std::size_t size) {
  return ::read(static_cast<Stream*>(cookie)->descriptor, bytes, size);
}

ssize_t write_stream(void* cookie, const char* bytes, std::size_t size) {
  const ssize_t written = ::write(static_cast<Stream*>(cookie)->descriptor, bytes, size);
  return written < 0 ? 0 : written;
}

int seek_stream(void* cookie, off64_t* offset, int from) {
  const off_t position = ::lseek(static_cast<Stream*>(cookie)->descriptor, *offset, from);
  if (position < 0) return -1;
  *offset = position;
  return 0;
}

int close_stream(void* cookie) {
  auto* stream = static_cast<Stream*>(cookie);
  const int descriptor = stream->descriptor;
  stream->file = nullptr;
  stream->used = false;
  return ::close(descriptor);
}

Stream* find_stream(const FILE* file) {
  for (Stream& stream : streams) {
    if (stream.file.load(std::memory_order_relaxed) == file) return &stream;
  }
  return nullptr;
}

FILE* make_stream(int descriptor, const char* mode) {
  for (Stream& stream : streams) {
    bool used = false;
    if (!stream.used.compare_exchange_strong(used, true)) continue;
    stream.descriptor = descriptor;
    FILE* made = fopencookie(&stream, mode, {read_stream, write_stream, seek_stream, close_stream});
    stream.file = made;
    if (made == nullptr) stream.used = false;
    return made;
  }
  errno = EMFILE;
  return nullptr;
}

// freopen of a stream that the C library can't open again: it gets another descriptor.
FILE* replace(FILE* file, Stream& stream, const Target& target, int flags) {
  const int opened = target.path == nullptr || flags < 0 ? -1 : open_target(target, flags, 0666);
  if (opened < 0) {
    const int error = target.path == nullptr ? EBADF : errno;
    std::fclose(file);
    errno = error;
    return nullptr;
  }
  std::fflush(file);
  ::close(stream.descriptor);
  stream.descriptor = opened;
  std::rewind(file);  // drops what was read
  return file;
}

// A program can begin with a file in place as its standard input.
__attribute__((constructor)) void take_standard_input() {
  if (identify(STDIN_FILENO).held != Held::kInPlace) return;
  if (FILE* made = make_stream(STDIN_FILENO, "r")) stdin = made;
}

// The flags of open for a mode of fopen, or -1.
int flags_of(const char* mode) {
  const char first = mode == nullptr ? 0 : *mode;
  if (first != 'r' && first != 'w' && first != 'a') {
    errno = EINVAL;
    return -1;
  }
  const bool both = std::strchr(mode, '+') != nullptr;
  int flags = both ? O_RDWR : first == 'r' ? O_RDONLY : O_WRONLY;
  if (first == 'w') flags |= O_CREAT | O_TRUNC;
  if (first == 'a') flags |= O_CREAT | O_APPEND;
  if (std::strchr(mode, 'e') != nullptr) flags |= O_CLOEXEC;
  if (std::strchr(mode, 'x') != nullptr) flags |= O_EXCL;
  return flags;
}

}  // namespace

PYDIST_HOOK(FILE*, fdopen, int descriptor, const char* mode) {
  const bool counted = tracked(descriptor);
  const Held held = identify(descriptor).held;
  if (counted || held == Held::kInPlace || held == Held::kDirectory) {
    if (flags_of(mode) < 0) return nullptr;
    return make_stream(descriptor, mode);
  }
  return real_fdopen(descriptor, mode);
}

PYDIST_HOOK(FILE*, fopen, const char* path, const char* mode) {
  const Target target(AT_FDCWD, path);
  const bool counted = target.counted && profiling();
  const bool link = target.path != nullptr && mount().has_packs() && can_be_link(target.path);
  if (!target.in_pack() && !counted && !link) return real_fopen(target.path, mode);
  Call call(CallKind::kOpen, target.counted);
  const int flags = flags_of(mode);
  const int opened = flags < 0 ? -1 : open_target(target, flags, 0666);
  if (opened < 0) return call(static_cast<FILE*>(nullptr));
  FILE* made = hook_fdopen(opened, mode);
  if (made == nullptr) ::close(opened);
  return call(made);
}
PYDIST_ALIAS(fopen64, fopen);

PYDIST_HOOK(FILE*, freopen, const char* path, const char* mode, FILE* file) {
  const Target target(AT_FDCWD, path);
  Stream* stream = find_stream(file);
  if (!target.in_pack() && stream == nullptr) return real_freopen(target.path, mode, file);
  Call call(CallKind::kOpen, target.counted);
  const int flags = flags_of(mode);
  if (stream != nullptr) return call(replace(file, *stream, target, flags));
  const int opened = flags < 0 ? -1 : open_whole(target, flags);
  if (opened < 0) {
    const int error = errno;
    std::fclose(file);
    errno = error;
    return call(static_cast<FILE*>(nullptr));
  }
  char link[64];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", opened);
  FILE* result = real_freopen(link, mode, file);
  ::close(opened);
  return call(result);
}
PYDIST_ALIAS(freopen64, freopen);

PYDIST_HOOK(int, fileno, FILE* file) {
  const int error = errno;
  const int known = real_fileno(file);
  if (known >= 0) return known;
  const Stream* stream = find_stream(file);
  if (stream == nullptr) return -1;
  errno = error;
  return stream->descriptor;
}
PYDIST_ALIAS(fileno_unlocked, fileno);

}  // namespace pydist::preload
