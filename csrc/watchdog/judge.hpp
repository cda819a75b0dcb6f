// Decides whether a job hangs, from the progress that its ranks record.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "watchdog/board.hpp"

namespace pydist::watchdog {

// A sample of one rank's progress.
struct Sample {
  Kind kind = Kind::kSpan;
  std::uint64_t beats = 0;
  bool joined = false;  // the rank has joined, whether or not its process still exists
};

// A job hangs if nothing on this machine has made progress for the limit while a rank waits in an
// exchange or is busy in guarded work. Ranks that compute, read or idle may be silent for any time
// while no other rank waits for them.
class Judge {
 public:
  // Long work, and the end of the program, may be silent for this many limits.
  static constexpr double kPatience = 3;

  // limit: seconds. all_here: whether this machine has all ranks of the job.
  Judge(double limit, bool all_here) : limit_(limit), all_here_(all_here) {}

  // Seconds without progress if the job hangs. `now` in seconds of a monotonic clock.
  std::optional<double> look(double now, const std::vector<Sample>& ranks);

  // Restarts the count: this process was itself stopped, or is being debugged.
  void start_again() { seen_.clear(); }

 private:
  double allowed(const std::vector<Sample>& ranks) const;

  double limit_;
  bool all_here_;
  double progress_ = 0;  // when something last changed
  std::vector<std::uint64_t> seen_;
};

}  // namespace pydist::watchdog
