// The mount: what `pydist store exec` says in the environment, and the pack that is opened on
// demand.
#pragma once

#include <cerrno>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "packs/folder.hpp"
#include "packs/protocol.hpp"

namespace pydist::preload {

// The settings of a mount. They are read once, and the same in all processes of a program.
struct Mount {
  std::string path;     // of the mount point: absolute, normalized, without a link; "" for no mount
  std::string packs;    // the pack folder; "" if only calls are counted
  std::string folders;  // a folder with one empty folder per packed directory that was opened,
                        // and with the files of the cache
  std::string identity;       // distinguishes the pack in the names of descriptors
  std::string output;         // the name of the output folder at the mount point; "" for none
  std::string output_target;  // its real path
  std::vector<std::string> servers;  // of partitions that are on other nodes
  packs::Secret secret{};
  std::uint64_t large = 0;  // raw files of more bytes are read in place
  std::uint64_t cache = 0;  // bytes of files whose copies stay in memory

  bool has_packs() const { return !packs.empty(); }
};

const Mount& mount();

// The pack; nullptr if it can't be opened, which is said once on standard error.
const packs::Folder* pack();

// Says on standard error why a call fails with EIO.
void report(const char* reason) noexcept;

// While one exists in a thread, its calls go to the C library: they are this library's own.
class Inside {
 public:
  Inside() : before_(flag) { flag = true; }
  ~Inside() { flag = before_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  static bool active() { return flag; }

 private:
  static inline thread_local bool flag __attribute__((tls_model("initial-exec"))) = false;
  bool before_;
};

// Calls a function that may throw, and returns what it returns, else `failure` with errno EIO (the
// pack is damaged, which is reported) or ENOMEM.
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
