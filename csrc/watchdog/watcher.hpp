// The watchdog of one rank: a thread without the interpreter's lock that ends a hanging job.
//
// Each process has one, which lives until the process ends. The first watchdog that sees the hang
// reports it for all ranks of its machine, and each prepares its own part: Python's stacks and the
// layer at work.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "watchdog/board.hpp"
#include "watchdog/report.hpp"

namespace pydist::watchdog {

inline constexpr int kExitCode = 72;  // of pydist.errors.RankLost

// The watchdog's requests to the program's own thread, as one byte.
enum class Question : char {
  kReport = '?',  // a report is due: `answer`, and `tell_elsewhere`
  kWaits = 'w',   // this rank waits for half of the limit; only if the job has other machines
  kGoesOn = 'g',  // it continues
};

struct Options {
  int rank = 0;
  Job job;
  int output = 2;           // descriptor that takes the report
  bool as_message = false;  // as a line of JSON for the launcher, not as text
  int stacks = -1;          // descriptor to which `signal`'s handler writes a thread's Python stack
  int signal = 0;
  int questions = -1;  // takes a `Question`
  int launcher = -1;   // descriptor that takes `farewell` before this process ends, if there is one
  std::string farewell;
};

// Starts the watchdog of this process, in the thread that runs the program, on a board in the file
// `board`.
//
// Throws UsageError if the process has one already, or the file can't be mapped.
void start(const Options& options, int board);

// Whether this process has a watchdog.
bool is_watched();

// For the program's threads; without a watchdog they do nothing.
void enter(std::string_view name, PhaseKind kind);
void leave();
void mark_step(std::int64_t step);

// The layer at work, and the call that the rank waits in, for the report.
void answer(std::string_view layer, std::string_view call);

// The state of ranks of other machines, for the report: one line each.
void tell_elsewhere(std::string_view lines);

// The ranks of this machine that have reached the end of their program, in order.
std::vector<int> ended_ranks();

}  // namespace pydist::watchdog
