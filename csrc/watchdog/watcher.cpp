// The watchdog's thread: reads the pages of all ranks, judges, reports and ends the job.
#include "watchdog/watcher.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.hpp"
#include "watchdog/judge.hpp"
#include "watchdog/stacks.hpp"

namespace pydist::watchdog {
namespace {

constexpr double kShortestTick = 0.02;
constexpr double kLongestTick = 0.5;
constexpr double kTellSeconds = 0.3;    // for a rank to write its stacks
constexpr double kGatherSeconds = 1;    // for all of them
constexpr double kDrainSeconds = 0.15;  // MPICH drops what a rank writes just before it ends
constexpr double kReportSeconds = 10;   // after which other ranks no longer wait for the reporter
constexpr double kLongWait = 0.5;       // of the limit, after which other machines are notified

std::atomic<Slot*> own_slot{nullptr};
std::atomic<const Board*> own_board{nullptr};
std::atomic<int> own_size{0};
// Never destroyed: the watchdog's thread lives until the process ends.
std::mutex& elsewhere_mutex = *new std::mutex;
std::string& elsewhere = *new std::string;

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void rest(double seconds) {
  const auto whole = static_cast<time_t>(seconds);
  const timespec pause{whole, static_cast<long>(1e9 * (seconds - static_cast<double>(whole)))};
  nanosleep(&pause, nullptr);
}

class Watcher {
 public:
  Watcher(const Options& options, Board& board, pthread_t main_thread)
      : options_(options),
        board_(board),
        main_thread_(main_thread),
        judge_(options.job.limit, options.job.all_here),
        tick_(std::clamp(options.job.limit / 20, kShortestTick, kLongestTick)) {}

  [[noreturn]] void run() {
    double last = now();
    while (true) {
      rest(tick_);
      const double time = now();
      // This process was stopped, with the job or alone, and has missed any progress since.
      if (time - last > std::max(1.0, 4 * tick_)) judge_.start_again();
      last = time;
      if (!options_.job.all_here) look_at_own(time);
      if (board_.reporter.load() != 0) {
        assist();
      } else if (const auto silent = judge_.look(time, samples()); silent && !is_traced()) {
        std::int32_t none = 0;
        if (board_.reporter.compare_exchange_strong(none, getpid())) report(*silent);
      }
      last = std::max(last, now() - tick_);
    }
  }

 private:
  std::vector<Sample> samples() {
    std::vector<Sample> result(static_cast<std::size_t>(options_.job.size));
    if (!options_.job.all_here) result.clear();
    for (int rank = 0; rank < options_.job.size; ++rank) {
      const Slot& slot = board_.slot(rank);
      const int pid = slot.pid.load(std::memory_order_relaxed);
      if (pid == 0) continue;
      Sample sample{slot.kind(), slot.beats.load(std::memory_order_relaxed), true};
      if (kill(pid, 0) != 0) sample.kind = PhaseKind::kEnd;  // sends nothing more
      if (options_.job.all_here) {
        result[static_cast<std::size_t>(rank)] = sample;
      } else {
        result.push_back(sample);
      }
    }
    return result;
  }

  std::vector<Finding> findings() const {
    std::vector<Finding> found;
    for (int rank = 0; rank < options_.job.size; ++rank) {
      const int pid = board_.slot(rank).pid.load();
      if (pid != 0) found.push_back({rank, pid, state_of(pid), {}});
    }
    return found;
  }

  // Notifies other machines when this rank waits for long, and when it continues.
  void look_at_own(double time) {
    const Slot& slot = board_.slot(options_.rank);
    const std::uint64_t beats = slot.beats.load(std::memory_order_relaxed);
    if (beats != own_beats_) {
      own_beats_ = beats;
      own_progress_ = time;
      if (waits_long_) ask(Question::kGoesOn);
      waits_long_ = false;
    } else if (!waits_long_ && time - own_progress_ > kLongWait * options_.job.limit) {
      const PhaseKind kind = slot.activity();
      waits_long_ =
          kind == PhaseKind::kWait || kind == PhaseKind::kBlocked || kind == PhaseKind::kEnd;
      if (waits_long_) ask(Question::kWaits);
    }
  }

  void ask(Question question) const {
    const char byte = static_cast<char>(question);
    if (options_.questions >= 0) write_all(options_.questions, {&byte, 1});
  }

  bool is_traced() const {
    const std::vector<Finding> found = findings();
    return std::any_of(found.begin(), found.end(), [](const Finding& f) { return f.state.traced; });
  }

  // Writes this rank's stacks, and its layer if the interpreter is free.
  void tell() {
    if (options_.stacks >= 0 && ftruncate(options_.stacks, 0) == 0) {
      lseek(options_.stacks, 0, SEEK_SET);
      ask_for_stacks(options_.signal, main_thread_);
    }
    ask(Question::kReport);
    rest(kTellSeconds);
    board_.slot(options_.rank).told.store(board_.reports.load() + 1);
  }

  // Another rank reports: prepares this one's part, and ends with the others.
  void assist() {
    tell();
    const double began = now();
    while (board_.reported.load() == 0) {
      if (board_.reporter.load() == 0) {  // a debugger
        judge_.start_again();
        return;
      }
      if (now() - began > kReportSeconds) break;
      rest(0.01);
    }
    _exit(kExitCode);
  }

  void report(double silent) {
    tell();
    std::vector<Finding> found = findings();
    const double began = now();
    const auto has_told = [&](const Finding& each) {
      return each.state.is_stopped() || each.state.is_gone() ||
             board_.slot(each.rank).told.load() > board_.reports.load();
    };
    while (!std::all_of(found.begin(), found.end(), has_told) && now() - began < kGatherSeconds) {
      rest(0.02);
    }
    bool debugged = false;
    for (Finding& each : found) {
      const Slot& slot = board_.slot(each.rank);
      const int stacks = slot.stacks.load();
      if (stacks < 0 || each.state.is_stopped() || each.state.is_gone()) continue;
      each.stacks =
          content_of("/proc/" + std::to_string(each.pid) + "/fd/" + std::to_string(stacks));
      debugged = debugged || in_debugger(each.stacks);
    }
    if (debugged) {
      judge_.start_again();
      board_.reports.fetch_add(1);
      board_.reporter.store(0);
      return;
    }
    const std::string text = describe(options_.job, board_, found, silent, of_other_machines());
    write_all(options_.output, options_.as_message ? "{\"hang\": " + quoted(text) + "}\n" : text);
    rest(kDrainSeconds);
    board_.reported.store(1);
    std::vector<int> others;
    for (const Finding& each : found) {
      if (each.rank != options_.rank && !each.state.is_gone()) others.push_back(each.pid);
    }
    kill_later(others);
    if (options_.launcher >= 0) write_all(options_.launcher, options_.farewell);
    rest(kDrainSeconds);  // the others end with the same code, where they can
    _exit(kExitCode);
  }

  static std::string of_other_machines() {
    const std::lock_guard lock(elsewhere_mutex);
    return elsewhere;
  }

  Options options_;
  Board& board_;
  pthread_t main_thread_;
  Judge judge_;
  double tick_;
  std::uint64_t own_beats_ = 0;
  double own_progress_ = now();  // time of this rank's last progress
  bool waits_long_ = false;
};

// A fork of a rank is no rank: it must not report in the rank's name.
void forget_rank() { own_slot.store(nullptr); }

}  // namespace

void start(const Options& options, int board) {
  if (own_slot.load() != nullptr) throw UsageError("this process has a watchdog already");
  const std::size_t bytes = Board::bytes(static_cast<std::size_t>(options.job.size));
  if (ftruncate(board, static_cast<off_t>(bytes)) != 0) {
    throw UsageError("the watchdog's page has no room");
  }
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, board, 0);
  if (memory == MAP_FAILED) throw UsageError("the watchdog's page can't be mapped");
  auto* const page = static_cast<Board*>(memory);
  Slot& slot = page->slot(options.rank);
  slot.stacks.store(options.stacks);
  slot.pid.store(getpid());
  own_board.store(page);
  own_size.store(options.job.size);
  own_slot.store(&slot);
  pthread_atfork(nullptr, nullptr, forget_rank);
  if (options.stacks >= 0) serve_stacks(options.signal);
  // Signals must reach the program's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const pthread_t main_thread = pthread_self();
  std::thread([options, page, main_thread] {
    Watcher(options, *page, main_thread).run();
  }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

bool is_watched() { return own_slot.load() != nullptr; }

void enter(std::string_view name, PhaseKind kind) {
  if (Slot* const slot = own_slot.load(std::memory_order_relaxed)) slot->enter(name, kind);
}

void leave() {
  if (Slot* const slot = own_slot.load(std::memory_order_relaxed)) slot->leave();
}

void mark_step(std::int64_t step) {
  if (Slot* const slot = own_slot.load(std::memory_order_relaxed)) {
    slot->step.store(step, std::memory_order_relaxed);
    slot->beat();
  }
}

std::vector<int> ended_ranks() {
  std::vector<int> ended;
  const Board* const board = own_board.load();
  for (int rank = 0; board != nullptr && rank < own_size.load(); ++rank) {
    const Slot& slot = board->slot(rank);
    const int pid = slot.pid.load();
    if (pid != 0 && (slot.kind() == PhaseKind::kEnd || state_of(pid).is_gone()))
      ended.push_back(rank);
  }
  return ended;
}

void answer(std::string_view layer, std::string_view call) {
  if (Slot* const slot = own_slot.load(std::memory_order_relaxed)) {
    slot->layer.store(layer);
    slot->call.store(call);
  }
}

void tell_elsewhere(std::string_view lines) {
  const std::lock_guard lock(elsewhere_mutex);
  elsewhere = lines;
}

}  // namespace pydist::watchdog
