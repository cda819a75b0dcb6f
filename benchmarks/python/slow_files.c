// Emulates a shared file system: a delay before calls on paths below a folder, and before reads of
// files that were opened there. Preloaded by slow_files.py.
//
//   SLOW_FOLDER       the folder, an absolute path
//   SLOW_METADATA_NS  delay of each call that looks a path up (open, stat, access, opendir)
//   SLOW_READ_NS      delay of each read and pread
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char* folder;
static size_t folder_size;
static long metadata_ns, read_ns;
static unsigned char is_slow[1 << 16];  // by descriptor

static long number(const char* name) {
  const char* text = getenv(name);
  return text == NULL ? 0 : atol(text);
}

__attribute__((constructor)) static void set_up(void) {
  folder = getenv("SLOW_FOLDER");
  folder_size = folder == NULL ? 0 : strlen(folder);
  metadata_ns = number("SLOW_METADATA_NS");
  read_ns = number("SLOW_READ_NS");
  prctl(PR_SET_TIMERSLACK, 1000);  // by default the kernel adds 50 us to each delay
}

static void wait_for(long ns) {
  struct timespec left = {ns / 1000000000, ns % 1000000000};
  if (ns > 0) nanosleep(&left, NULL);
}

// Waits if a path is below the folder; returns whether it is.
static int look_up(const char* path) {
  if (folder_size == 0 || path == NULL || strncmp(path, folder, folder_size) != 0) return 0;
  wait_for(metadata_ns);
  return 1;
}

static int opened(int file, int slow) {
  if (file >= 0 && file < (int)sizeof(is_slow)) is_slow[file] = (unsigned char)slow;
  return file;
}

static void before_read(int file) {
  if (file >= 0 && file < (int)sizeof(is_slow) && is_slow[file]) wait_for(read_ns);
}

#define REAL(name) ((__typeof__(&name))real(&real_##name, #name))
#define CACHE(name) static void* real_##name

static void* real(void** found, const char* name) {
  if (*found == NULL) *found = dlsym(RTLD_NEXT, name);
  return *found;
}

#define OPEN(name)                                         \
  CACHE(name);                                             \
  int name(const char* path, int flags, ...) {             \
    va_list more;                                          \
    va_start(more, flags);                                 \
    const mode_t mode = va_arg(more, mode_t);              \
    va_end(more);                                          \
    const int slow = look_up(path);                        \
    return opened(REAL(name)(path, flags, mode), slow);    \
  }
#define OPENAT(name)                                              \
  CACHE(name);                                                    \
  int name(int at, const char* path, int flags, ...) {            \
    va_list more;                                                 \
    va_start(more, flags);                                        \
    const mode_t mode = va_arg(more, mode_t);                     \
    va_end(more);                                                 \
    const int slow = look_up(path);                               \
    return opened(REAL(name)(at, path, flags, mode), slow);       \
  }
#define STAT(name, type)                          \
  CACHE(name);                                    \
  int name(const char* path, struct type* out) {  \
    look_up(path);                                \
    return REAL(name)(path, out);                 \
  }
#define STATAT(name, type)                                           \
  CACHE(name);                                                       \
  int name(int at, const char* path, struct type* out, int flags) {  \
    look_up(path);                                                   \
    return REAL(name)(at, path, out, flags);                         \
  }
#define PREAD(name, type)                                               \
  CACHE(name);                                                          \
  ssize_t name(int file, void* bytes, size_t size, type offset) {       \
    before_read(file);                                                  \
    return REAL(name)(file, bytes, size, offset);                       \
  }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)
STATAT(fstatat, stat)
STATAT(fstatat64, stat64)
PREAD(pread, off_t)
PREAD(pread64, off64_t)

CACHE(statx);
int statx(int at, const char* path, int flags, unsigned mask, struct statx* out) {
  look_up(path);
  return REAL(statx)(at, path, flags, mask, out);
}

CACHE(access);
int access(const char* path, int mode) {
  look_up(path);
  return REAL(access)(path, mode);
}

CACHE(opendir);
DIR* opendir(const char* path) {
  look_up(path);
  return REAL(opendir)(path);
}

CACHE(fopen);
FILE* fopen(const char* path, const char* mode) {
  look_up(path);
  return REAL(fopen)(path, mode);
}

CACHE(fopen64);
FILE* fopen64(const char* path, const char* mode) {
  look_up(path);
  return REAL(fopen64)(path, mode);
}

CACHE(read);
ssize_t read(int file, void* bytes, size_t size) {
  before_read(file);
  return REAL(read)(file, bytes, size);
}
