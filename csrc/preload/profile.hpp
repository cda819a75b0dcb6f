// Counts calls on files at and below the mount point, over all processes of a program.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <type_traits>

namespace pydist::preload {

// The order is that of `KINDS` in pydist/cli/store_profile.py. A kind has many functions: kRead all
// that read, pread and readv included.
enum class CallKind : unsigned {
  kOpen,
  kClose,
  kRead,
  kWrite,
  kSeek,
  kMap,
  kStat,
  kList,
  kAccess,
  kChange,
  kCount
};

// Whether calls are counted: PYDIST_MOUNT_PROFILE names a file for the counters, which could be
// mapped.
bool profiling();

// Descriptors below the mount point. Their numbers are only counted with, so a number that was
// closed within the C library does no harm to the program.
void track(int descriptor, bool below);
bool tracked(int descriptor);

// Counts a file that was opened, or a directory that was listed, once over all processes.
void count_file(const struct stat& status);

// A call in progress: counts it, its time, how many are in progress at once, and its result.
class Call {
 public:
  // below: the call is on a file at or below the mount point; others are not counted, nor are this
  // library's own calls.
  Call(CallKind kind, bool below);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Passes the result of the call on, and counts it as failed if it is negative or null.
  template <class Result>
  Result operator()(Result result) {
    if constexpr (std::is_pointer_v<Result>) {
      failed_ = result == nullptr;
    } else {
      failed_ = result < 0;
    }
    return result;
  }

  // The same for a result that is a number of bytes.
  template <class Result>
  Result moved(Result result) {
    if (result > 0) bytes_ = static_cast<std::uint64_t>(result);
    return (*this)(result);
  }

 private:
  CallKind kind_;
  bool counted_;
  bool failed_ = false;
  std::uint64_t bytes_ = 0;
  std::uint64_t start_ = 0;
};

// Calls that a thread can be cancelled in unwind the stack, so the functions that make them have
// nothing to destroy unless they are counted.
template <class Function>
[[gnu::noinline]] auto count_call(CallKind kind, Function make) {
  Call call(kind, true);
  return call(make());
}

template <class Function>
[[gnu::noinline]] auto count_bytes(CallKind kind, Function make) {
  Call call(kind, true);
  return call.moved(make());
}

// Makes a call that moves bytes, and counts it if the descriptor is below the mount point.
template <class Function>
auto on_descriptor(CallKind kind, int descriptor, Function make) {
  return tracked(descriptor) ? count_bytes(kind, make) : make();
}

}  // namespace pydist::preload
