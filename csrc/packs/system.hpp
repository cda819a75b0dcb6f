// Descriptors of open files, failed calls of the system as one line, and a clock.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>

#include "core/errors.hpp"
#include "packs/format.hpp"

namespace pydist::packs {

// An open file or socket, which its destructor closes; -1 for none. Errors of close are ignored:
// what must be on disk is flushed before (PartitionWriter::finish).
class Descriptor {
 public:
  // Takes over a descriptor, or the -1 that a failed call has returned: errno stays the reason.
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  // Swaps: the file held so far is closed with `other`.
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  int get() const { return number_; }
  // The caller closes it from here on.
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

// Throws PackError with the reason in errno, as "FILE: No such file or directory". Call it before
// anything that changes errno. file: a path, or the address of a server. Throws UsageError for too
// many open files: the file is not damaged, and code that skips damaged files must not skip it.
[[noreturn]] inline void throw_system(const std::string& file) {
  if (errno == EMFILE) {
    throw UsageError(file + ": this process has too many open files (ulimit -n)");
  }
  throw PackError(file + ": " + std::generic_category().message(errno));
}

// Whole seconds of a clock that never goes back, for time limits; its zero means nothing.
inline std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace pydist::packs
