// What the ranks of a communicator of the recorder share; see nccl_recorder.cpp.
#pragma once

#include <signal.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <thread>

namespace recorder {

// In memory that all have mapped. Each number has one rank that writes it, and only grows: nobody
// needs a lock, which a process that is killed would keep.
struct Board {
  static constexpr int kMost = 32;  // ranks
  static constexpr int kAborted = -1;
  static constexpr int kLeft = -1;
  static constexpr auto kPatience = std::chrono::seconds(20);
  static constexpr auto kSlice = std::chrono::milliseconds(100);

  struct Rank {
    std::atomic<int> process;  // 0 before it has joined, kLeft when it has left
    std::atomic<bool> begun;   // a first group: others can connect to it
    // The file that its group under way has for others; so long as a count says that one is needed.
    char sheet[64];
    std::atomic<long> sent[kMost], taken[kMost];  // messages to and from each rank
    std::atomic<long> met, seen;  // collectives that it has come to, and of which it has all
    char why[128];                // it has ended the communicator
  };

  Rank ranks[kMost];
  std::atomic<int> ended;              // kAborted, or 1 + the rank that says why
  std::atomic<std::uint32_t> changes;  // of anything here

  static_assert(std::atomic<long>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

  void tell() {
    ++changes;
#ifdef __linux__
    syscall(SYS_futex, &changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
  }

  // Whether this is what ends it.
  bool end(int how) {
    int before = 0;
    const bool first = ended.compare_exchange_strong(before, how);
    tell();
    return first;
  }

  enum class Waited { kDone, kEnded, kInVain };

  template <class Condition>
  Waited await(Condition condition) {
    const auto limit = std::chrono::steady_clock::now() + kPatience;
    for (;;) {
      const std::uint32_t before = changes;
      if (ended != 0) return Waited::kEnded;
      if (condition()) return Waited::kDone;
      if (std::chrono::steady_clock::now() > limit) return Waited::kInVain;
      if (!change(before) && lost()) end(kAborted);
    }
  }

 private:
  // False if none has come for some time.
  bool change(std::uint32_t before) const {
#ifdef __linux__
    const timespec slice{0, std::chrono::nanoseconds(kSlice).count()};
    return syscall(SYS_futex, &changes, FUTEX_WAIT, before, &slice, nullptr, 0) == 0 ||
           errno != ETIMEDOUT;
#else
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    return before != changes;
#endif
  }

  // Whether a process has ended that had not left.
  bool lost() const {
    for (const Rank& each : ranks) {
      const int process = each.process;
      if (process > 0 && kill(process, 0) != 0 && errno == ESRCH) return true;
    }
    return false;
  }
};

}  // namespace recorder
