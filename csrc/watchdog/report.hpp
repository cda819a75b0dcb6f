// The text that says which ranks hang, and where.
#pragma once

#include <string>
#include <vector>

#include "watchdog/board.hpp"
#include "watchdog/process.hpp"

namespace pydist::watchdog {

struct Job {
  int size = 1;          // ranks
  bool all_here = true;  // whether this machine has all of them
  int here = 1;          // how many it has
  std::string host;
  double limit = 0;  // seconds
};

// What was found of one rank.
struct Finding {
  int rank = 0;
  int pid = 0;
  ProcessState state;
  std::string stacks;  // as faulthandler wrote them
};

// What a rank is doing: its innermost frame and the one that guards it.
std::string doing(const Slot& slot);

// The stacks of the threads that do something: not of those that wait for work.
std::string busy_threads(const std::string& stacks);

// Whether a debugger waits for its user in one of these stacks.
bool in_debugger(const std::string& stacks);

// The whole report, one line a rank, those that others wait for first, then `elsewhere`, lines on
// ranks of other machines, then the stacks.
std::string describe(const Job& job, const Board& board, const std::vector<Finding>& ranks,
                     double silent, const std::string& elsewhere = "");

// A text as a JSON string.
std::string quoted(const std::string& text);

}  // namespace pydist::watchdog
