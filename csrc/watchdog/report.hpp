// The text of a report: the ranks that hang, and where.
#pragma once

#include <string>
#include <vector>

#include "watchdog/board.hpp"
#include "watchdog/process.hpp"

namespace pydist::watchdog {

struct Job {
  int size = 1;          // ranks
  bool all_here = true;  // whether this machine has all of them
  int here = 1;          // number of ranks on this machine
  std::string host;
  double limit = 0;  // seconds
};

// The findings on one rank.
struct Finding {
  int rank = 0;
  int pid = 0;
  ProcessState state;
  std::string stacks;  // as faulthandler wrote them
};

// The work of a rank: its innermost frame and the one that guards it.
std::string doing(const Slot& slot);

// The stacks of busy threads, without those that wait for work.
std::string busy_threads(const std::string& stacks);

// Whether a debugger waits for input in one of these stacks.
bool in_debugger(const std::string& stacks);

// The full report: one line per rank, awaited ranks first, then `elsewhere`, lines on ranks of
// other machines, then the stacks.
std::string describe(const Job& job, const Board& board, const std::vector<Finding>& ranks,
                     double silent, const std::string& elsewhere = "");

// A text as a JSON string.
std::string quoted(const std::string& text);

}  // namespace pydist::watchdog
