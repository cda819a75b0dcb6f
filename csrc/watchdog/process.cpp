// Reads the state of a process from /proc, and ends processes that can't end themselves.
#include "watchdog/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>

namespace pydist::watchdog {
namespace {

constexpr long kKillNanoseconds = 300'000'000;
constexpr int kWriteMilliseconds = 1000;

// The launcher's exit code is that of the rank that it sees end first, so the others end later.
[[noreturn]] void kill_and_exit(const std::vector<int>& pids) {
  setsid();  // launchers kill the process group of a rank that ends
  const timespec pause{0, kKillNanoseconds};
  nanosleep(&pause, nullptr);
  for (const int pid : pids) kill(pid, SIGKILL);
  _exit(0);
}

}  // namespace

std::string content_of(const std::string& path, std::size_t most) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  std::string text;
  std::array<char, 4096> block;
  while (text.size() < most) {
    const ssize_t got = read(file, block.data(), block.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    text.append(block.data(), static_cast<std::size_t>(got));
  }
  close(file);
  return text;
}

ProcessState state_of(int pid) {
  ProcessState state;
  if (kill(pid, 0) != 0 && errno == ESRCH) {
    state.letter = 'X';
    return state;
  }
  const std::string folder = "/proc/" + std::to_string(pid);
  // "pid (name) S ...": the name may contain any characters.
  const std::string stat = content_of(folder + "/stat");
  const std::size_t name_end = stat.rfind(')');
  if (name_end != std::string::npos && name_end + 2 < stat.size())
    state.letter = stat[name_end + 2];
  const std::string status = content_of(folder + "/status");
  const std::size_t tracer = status.find("TracerPid:\t");
  state.traced = tracer != std::string::npos && status.compare(tracer + 11, 2, "0\n") != 0;
  state.inside = content_of(folder + "/wchan");
  if (state.inside == "0") state.inside.clear();
  return state;
}

void write_all(int descriptor, std::string_view text) {
  // By poll, and in pieces that fit a pipe: the descriptor is shared, and its flags must not
  // change.
  constexpr std::size_t kPiece = 512;
  while (!text.empty()) {
    pollfd ready{descriptor, POLLOUT, 0};
    if (poll(&ready, 1, kWriteMilliseconds) <= 0) return;
    const ssize_t wrote = write(descriptor, text.data(), std::min(text.size(), kPiece));
    if (wrote < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (wrote <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(wrote));
  }
}

void kill_later(const std::vector<int>& pids) {
  if (pids.empty()) return;
#if defined(__linux__)
  // Not fork(): its handlers (of MPI, of OpenMP) may wait for a lock that a thread never releases.
  const long child = syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr);
#else
  const pid_t child = fork();
#endif
  if (child == 0) kill_and_exit(pids);
}

}  // namespace pydist::watchdog
