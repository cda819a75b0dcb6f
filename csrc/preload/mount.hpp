// The mount: what `pydist store exec` says in the environment, and the pack that is opened on
// demand.
#pragma once

#include <cerrno>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string_view>

#include "packs/folder.hpp"
#include "packs/protocol.hpp"

namespace pydist::preload {

// The settings of a mount, from the variables PYDIST_MOUNT*. They are read once, and the same in
// all processes of a program: programs inherit the environment. After each text but `output` is a
// null byte.
struct Mount {
  std::string_view path;   // of the mount point: absolute, normalized, without a link; "" for none
  std::string_view packs;  // the pack folder; "" if only calls are counted
  std::string_view folders;  // a folder with one empty folder per packed directory that was opened,
                             // and with the files of the cache
  std::string_view parents;  // a folder with stand-ins for missing parents of the mount point
  std::size_t existing = 0;  // bytes of the path of its deepest parent that exists
  std::string_view identity;       // distinguishes the pack in the names of descriptors
  std::string_view output;         // the name of the output folder at the mount point; "" for none
  std::string_view output_target;  // its real path
  std::string_view servers;  // of partitions that are on other nodes, with commas between them
  packs::Secret secret{};    // for those servers
  std::uint64_t large = 0;   // raw files of more bytes are read in place
  std::uint64_t cache = 0;   // bytes of files whose copies stay in memory

  bool has_packs() const { return !packs.empty(); }
};

// The settings, for the lifetime of the process; an empty path without a mount. Any thread may be
// the first to ask: it takes no lock, which a fork could leave held. Allocators may ask, as they
// read their own settings: it takes no memory from them.
const Mount& mount();

// The pack, for the lifetime of the process. Throws the reason if it can't be opened; the next call
// tries again.
const packs::Folder& pack();

// Whether this is the child of a vfork: it has its parent's memory, and descriptors of its own.
bool has_memory_of_parent();

// Says on standard error why a call fails with EIO. Only the first reason of a process: a program
// may repeat a call that fails.
void report(const char* reason) noexcept;

// While one exists in a thread, its calls go to the C library: they are this library's own, such as
// reads of the pack's partitions. Without it, hooks would call themselves. They may be nested.
class Inside {
 public:
  Inside() : before_(flag) { flag = true; }
  ~Inside() { flag = before_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  static bool active() { return flag; }

 private:
  // initial-exec: an access must not allocate memory, as one of the default model can.
  static inline thread_local bool flag __attribute__((tls_model("initial-exec"))) = false;
  bool before_;
};

// While one exists in the child of a vfork, `pack()` is opened anew, and closed with it. The parent
// would take descriptors that its own pack has opened there for its own.
class Apart {
 public:
  Apart();
  ~Apart();
  Apart(const Apart&) = delete;
  Apart& operator=(const Apart&) = delete;
  static Apart* current() { return innermost; }
  const packs::Folder& folder();

 private:
  static inline thread_local Apart* innermost __attribute__((tls_model("initial-exec"))) = nullptr;
  Apart* before_;
  std::unique_ptr<const packs::Folder> folder_;
};

// Calls a function that may throw, and returns what it returns, else `failure` with errno EIO (the
// pack is damaged, which is reported) or ENOMEM. Hooks call code that may throw through it: no
// exception may leave a function that a program in C has called.
template <class Function, class Result>
Result attempt(Result failure, Function function) noexcept {
  const Inside inside;
  try {
    return function();
  } catch (const std::bad_alloc&) {
    errno = ENOMEM;
  } catch (const std::exception& error) {
    report(error.what());
    errno = EIO;
  }
  return failure;
}

}  // namespace pydist::preload
