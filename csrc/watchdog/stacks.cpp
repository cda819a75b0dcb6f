// Python's stacks of all threads, by a signal that each thread answers itself.
#include "watchdog/stacks.hpp"

#include <dirent.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <string>

#include "watchdog/process.hpp"

namespace pydist::watchdog {
namespace {

constexpr int kMainMilliseconds = 50;  // for the main thread to write its stack before the others

std::atomic<void (*)(int)> write_own_stack{nullptr};
std::atomic_flag writes = ATOMIC_FLAG_INIT;
std::atomic<int> written{0};

void handle(int signal) {
  while (writes.test_and_set(std::memory_order_acquire)) sched_yield();
  write_own_stack.load()(signal);
  writes.clear(std::memory_order_release);
  written.fetch_add(1);
}

#if defined(__linux__)
bool is_blocked(const std::string& task, int signal) {
  const std::string status = content_of(task + "/status");
  const std::size_t at = status.find("SigBlk:\t");
  if (at == std::string::npos) return true;
  return (std::strtoull(status.c_str() + at + 8, nullptr, 16) >> (signal - 1) & 1U) != 0;
}
#endif

}  // namespace

void serve_stacks(int signal) {
  struct sigaction action;
  if (sigaction(signal, nullptr, &action) != 0 || action.sa_handler == handle) return;
  write_own_stack.store(action.sa_handler);
  action.sa_handler = handle;
  sigaction(signal, &action, nullptr);
}

void ask_for_stacks(int signal, pthread_t main_thread) {
  const int before = written.load();
  pthread_kill(main_thread, signal);
  constexpr timespec kMillisecond{0, 1'000'000};
  for (int i = 0; i < kMainMilliseconds && written.load() == before; ++i) {
    nanosleep(&kMillisecond, nullptr);
  }
#if defined(__linux__)
  const std::string folder = "/proc/self/task";
  DIR* const tasks = opendir(folder.c_str());
  if (tasks == nullptr) return;
  while (const dirent* const entry = readdir(tasks)) {
    const int thread = std::atoi(entry->d_name);
    // The main thread of the process has the process's number.
    if (thread <= 0 || thread == getpid()) continue;
    if (!is_blocked(folder + "/" + entry->d_name, signal)) {
      syscall(SYS_tgkill, getpid(), thread, signal);
    }
  }
  closedir(tasks);
#endif
}

}  // namespace pydist::watchdog
