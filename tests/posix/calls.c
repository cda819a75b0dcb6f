/* Program of test_programs.py: prints what calls of the C library return in the current directory. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <ftw.h>
#include <glob.h>
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

static unsigned long sum_of(const unsigned char* bytes, size_t size) {
  unsigned long sum = 5381;
  for (size_t i = 0; i < size; ++i) sum = sum * 33 + bytes[i];
  return sum;
}

static int visit(const char* path, const struct stat* status, int type, struct FTW* place) {
  const int file = type == FTW_F;
  printf("nftw %s %d %d %d %ld", path, type, place->base, place->level,
         file ? (long)status->st_size : 0L);
  if (getenv("MOVES")) printf(" %d", access(path + place->base, F_OK));
  printf("\n");
  return 0;
}

static int visit_old(const char* path, const struct stat* status, int type) {
  printf("ftw %s %d\n", path, type);
  return 0;
}

static int by_name(const FTSENT** a, const FTSENT** b) {
  return strcmp((*a)->fts_name, (*b)->fts_name);
}

static void walk_trees(void) {
  char* roots[] = {".", "./class/a", "class", "class/b/", NULL};
  const int options[] = {FTS_PHYSICAL, FTS_LOGICAL | FTS_NOCHDIR,
                         FTS_PHYSICAL | FTS_NOSTAT | FTS_NOCHDIR,
                         FTS_PHYSICAL | FTS_SEEDOT | FTS_XDEV};
  for (int kind = 0; kind < 4; ++kind) {
    FTS* tree = fts_open(roots, options[kind], by_name);
    FTSENT* entry;
    int count = 0;
    while ((entry = fts_read(tree))) {
      ++count;
      printf("fts %d %s %s %d %d %d\n", kind, entry->fts_path, entry->fts_name, entry->fts_info,
             entry->fts_level, entry->fts_namelen);
      if (kind == 1 && count == 7) fts_set(tree, entry, FTS_SKIP);
      if (kind == 3 && count == 5) break;
      if (kind != 0 || entry->fts_info != FTS_D) continue;
      FTSENT* child = fts_children(tree, count % 2 ? FTS_NAMEONLY : 0);
      for (; child; child = child->fts_link) printf("  child %s\n", child->fts_name);
    }
    printf("fts_close %d\n", fts_close(tree));
  }
  char* nothing[] = {"nothing", NULL};
  FTS* none = fts_open(nothing, FTS_PHYSICAL, NULL);
  FTSENT* first = fts_read(none);
  printf("fts of nothing %d %d\n", first->fts_info, first->fts_errno);
  fts_close(none);
  const int flags[] = {0, FTW_PHYS, FTW_DEPTH, FTW_CHDIR | FTW_PHYS};
  for (int i = 0; i < 4; ++i) {
    if (flags[i] & FTW_CHDIR) setenv("MOVES", "1", 1);
    printf("%d\n", nftw(i % 2 ? "./class" : ".", visit, 10, flags[i]));
  }
  printf("%d %d\n", ftw("class/a", visit_old, 5), ftw("nothing", visit_old, 5));
}

static void list_names(void) {
  glob_t found;
  printf("glob %d", glob("*/a/[1-3]*", GLOB_MARK, NULL, &found));
  printf(" %d", glob("{class,nothing}/*", GLOB_APPEND | GLOB_BRACE | GLOB_NOMAGIC, NULL, &found));
  for (size_t i = 0; i < found.gl_pathc; ++i) printf(" %s", found.gl_pathv[i]);
  globfree(&found);
  struct dirent** entries;
  const int count = scandir("class/a", &entries, NULL, alphasort);
  for (int i = 0; i < count; ++i) printf(" %s:%d", entries[i]->d_name, entries[i]->d_type);
  printf(" %d\n", scandir("lines", &entries, NULL, NULL));
  DIR* stream = opendir("class/a");
  struct stat one, other;
  fstat(dirfd(stream), &one);
  stat("class/a", &other);
  long places[16];
  int names = 0;
  for (places[0] = telldir(stream); readdir(stream); places[names] = telldir(stream)) ++names;
  seekdir(stream, places[names - 2]);
  const int left = (readdir(stream) != NULL) + (readdir(stream) != NULL) + (readdir(stream) != NULL);
  rewinddir(stream);
  struct dirent entry, *result;
  int read = 0;
  while (readdir_r(stream, &entry, &result) == 0 && result) ++read;
  printf("readdir %d %d %d %d\n", names, left, read, one.st_ino == other.st_ino);
  closedir(stream);
  const int directory = open("class", O_RDONLY | O_DIRECTORY);
  stream = fdopendir(openat(directory, "a", O_RDONLY));
  names = 0;
  while (readdir(stream)) ++names;
  closedir(stream);
  printf("fdopendir %d %d\n", names, fdopendir(-1) == NULL);
  printf("openat %d\n", openat(directory, "../nothing", O_RDONLY) == -1 && errno == ENOENT);
}

static void ask(const char* path) {
  struct stat by_path, by_descriptor;
  struct statx extended;
  struct statvfs system;
  const int opened = open(path, O_RDONLY);
  if (stat(path, &by_path) != 0 || fstat(opened, &by_descriptor) != 0) {
    printf("ask %s: %d\n", path, errno);
    return;
  }
  statx(AT_FDCWD, path, 0, STATX_BASIC_STATS, &extended);
  const int same = by_path.st_ino == by_descriptor.st_ino && by_path.st_ino == extended.stx_ino &&
                   by_path.st_dev == by_descriptor.st_dev;
  const long size = S_ISREG(by_path.st_mode) ? (long)extended.stx_size : 0;
  statx(opened, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &extended);
  printf("ask %s: %d %o %ld %ld.%09ld %d %d %d %d\n", path, same, by_path.st_mode, size,
         (long)by_path.st_mtim.tv_sec, by_path.st_mtim.tv_nsec, extended.stx_ino == by_path.st_ino,
         access(path, R_OK), faccessat(AT_FDCWD, path, X_OK, 0), statvfs(path, &system));
  char text[4096];
  char* real = realpath(path, text);
  printf("%s %s %d\n", strrchr(real, '/'), strrchr(canonicalize_file_name(path), '/'),
         (int)readlink(path, text, sizeof text));
  close(opened);
}

static void read_stream(const char* path, const char* mode) {
  FILE* file = fopen(path, mode);
  if (!file) {
    printf("fopen %s %s: %d\n", path, mode, errno);
    return;
  }
  char line[100];
  unsigned char bytes[5000];
  printf("fopen %s %s", path, mode);
  printf(" %s", fgets(line, sizeof line, file) ? "line" : "none");
  printf(" %ld %d", ftell(file), fseek(file, -10, SEEK_END));
  size_t got = fread(bytes, 1, sizeof bytes, file);
  printf(" %zu %lu %d", got, sum_of(bytes, got), feof(file));
  rewind(file);
  got = fread(bytes, 1, sizeof bytes, file);
  printf(" %zu %lu %d", got, sum_of(bytes, got), fileno(file) > 2);
  FILE* again = fdopen(dup(fileno(file)), "r");
  fseek(again, 3, SEEK_SET);
  printf(" %d", fgetc(again));
  fclose(again);
  file = freopen("class/a/1.bin", "r", file);
  got = file ? fread(bytes, 1, sizeof bytes, file) : 0;
  printf(" %zu %lu %d\n", got, sum_of(bytes, got), file ? fclose(file) : -1);
}

static void* read_all(void* argument) {
  unsigned long sum = 0;
  for (int round = 0; round < 20; ++round) {
    const int file = open((const char*)argument, O_RDONLY);
    unsigned char bytes[3000];
    ssize_t got;
    while ((got = read(file, bytes, sizeof bytes)) > 0) sum += sum_of(bytes, (size_t)got);
    close(file);
  }
  return (void*)sum;
}

/* Threads share a descriptor: each byte is read by one of them. */
static int shared;
static void* read_shared(void* argument) {
  long total = 0;
  char bytes[777];
  ssize_t got;
  while ((got = read(shared, bytes, sizeof bytes)) > 0) total += got;
  return (void*)total;
}

static void use_threads(void) {
  pthread_t threads[4];
  char* paths[] = {"lines", "class/a/5.bin", "class/b/4.bin", "lines"};
  void* results[4];
  for (int i = 0; i < 4; ++i) pthread_create(&threads[i], NULL, read_all, paths[i]);
  /* Forks while other threads open files. */
  for (int i = 0; i < 5; ++i) {
    const pid_t child = fork();
    if (child == 0) _exit(read_all("class/a/0.bin") == NULL);
    int status;
    waitpid(child, &status, 0);
    printf("fork %d\n", status);
  }
  for (int i = 0; i < 4; ++i) pthread_join(threads[i], &results[i]);
  printf("threads %lu %lu %lu\n", (unsigned long)results[0], (unsigned long)results[1],
         (unsigned long)results[2]);
  shared = open("lines", O_RDONLY);
  for (int i = 0; i < 4; ++i) pthread_create(&threads[i], NULL, read_shared, NULL);
  long total = 0;
  for (int i = 0; i < 4; ++i) {
    pthread_join(threads[i], &results[i]);
    total += (long)results[i];
  }
  printf("shared %ld\n", total);
}

/* A thread is cancelled in a call that waits, which unwinds its stack. */
static void cancel_thread(void) {
  int ends[2];
  pthread_t thread;
  void* result;
  if (pipe(ends) != 0) return;
  shared = ends[0];
  pthread_create(&thread, NULL, read_shared, NULL);
  usleep(20000);
  pthread_cancel(thread);
  pthread_join(thread, &result);
  printf("cancelled %d\n", result == PTHREAD_CANCELED);
}

static void start_programs(void) {
  for (int kind = 0; kind < 3; ++kind) {
    fflush(stdout);
    char* arguments[] = {"script", "argument", NULL};
    pid_t child = 0;
    int status = 0;
    if (kind == 0) {
      posix_spawn(&child, "./script", NULL, NULL, arguments, environ);
    } else if ((child = kind == 1 ? fork() : vfork()) == 0) {
      if (kind == 1) execl("script", "script", "of execl", NULL);
      execv("./script", arguments);
      _exit(9);
    }
    waitpid(child, &status, 0);
    printf("program %d\n", status);
  }
  char* none[] = {"lines", NULL};
  execv("lines", none);
  printf("execv %d\n", errno);
  execv("nothing", none);
  printf("execv %d\n", errno);
}

int main(void) {
  walk_trees();
  list_names();
  const char* paths[] = {"lines", "large", "empty", "class", "class/a/3.bin", "nothing", "lines/x"};
  for (int i = 0; i < 7; ++i) ask(paths[i]);
  const char* modes[] = {"r", "rb", "re", "rm", "x"};
  for (int i = 0; i < 5; ++i) read_stream(i % 2 ? "large" : "lines", modes[i]);
  read_stream("nothing", "r");
  read_stream("empty", "r");
  use_threads();
  cancel_thread();
  start_programs();
  for (int descriptor = 3; descriptor < 1024; ++descriptor) close(descriptor);
  read_stream("large", "r"); /* after all descriptors were closed, as by a daemon */
  return 0;
}
