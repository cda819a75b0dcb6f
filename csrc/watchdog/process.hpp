// The state of a process in the kernel, and the end of processes that can't end themselves.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace pydist::watchdog {

struct ProcessState {
  char letter = '?';   // of /proc: R runs, S sleeps, D waits for a disk, T stopped, Z dead; X gone
  std::string inside;  // the kernel function that it sleeps in, "" if unknown
  bool traced = false;

  bool is_gone() const { return letter == 'X' || letter == 'Z'; }
  bool is_stopped() const { return letter == 'T' || letter == 't'; }
};

// The state of a process of this machine.
ProcessState state_of(int pid);

// The content of a file of any length up to `most`, "" if it can't be read.
std::string content_of(const std::string& path, std::size_t most = 1 << 20);

// Writes all of `text`, giving up after a second: the reader may be stopped.
void write_all(int descriptor, std::string_view text);

// Makes a child process that kills the remaining `pids` a moment after this process has ended.
void kill_later(const std::vector<int>& pids);

}  // namespace pydist::watchdog
