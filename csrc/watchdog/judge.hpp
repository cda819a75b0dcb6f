// Decides whether a job hangs, from the progress that its ranks record.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "watchdog/board.hpp"

namespace pydist::watchdog {

// A sample of one rank's progress.
struct Sample {
  PhaseKind kind = PhaseKind::kSpan;
  std::uint64_t beats = 0;
  bool joined = false;  // the rank has joined, whether or not its process still exists
};

// A job hangs if nothing on this machine has made progress for the limit while a rank waits in an
// exchange or is busy in guarded work. Ranks that compute, read or idle may be silent for any time
// while no other rank waits for them. If all ranks of the job are here, and each waits or has
// ended, none can wake another: then 10 s, or a tenth of the limit if that is longer, are enough,
// and never more than the limit.
class Judge {
 public:
  // Long work, and the end of the program, may be silent for this many limits.
  static constexpr double kPatience = 3;

  // limit: seconds. all_here: whether this machine has all ranks of the job.
  Judge(double limit, bool all_here) : limit_(limit), all_here_(all_here) {}

  // Seconds without progress if the job hangs. `now` in seconds of a monotonic clock. Progress is a
  // change of any rank's beats, or a rank that joins. `ranks`: in the same order at each call; with
  // all_here, one for each rank of the job, else those of this machine that have joined.
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
