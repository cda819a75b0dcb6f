// The watchdog's parts without its thread: decisions, reports, and writes.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "watchdog/board.hpp"
#include "watchdog/judge.hpp"
#include "watchdog/process.hpp"
#include "watchdog/report.hpp"
#include "watchdog/stacks.hpp"

namespace pydist::watchdog {
namespace {

struct Free {
  void operator()(Board* board) const { ::operator delete(board); }
};

std::unique_ptr<Board, Free> empty_board(std::size_t ranks) {
  void* const memory = ::operator new(Board::bytes(ranks));
  std::memset(memory, 0, Board::bytes(ranks));
  return std::unique_ptr<Board, Free>(static_cast<Board*>(memory));
}

std::vector<Sample> both(PhaseKind first, PhaseKind second, std::uint64_t beats = 1) {
  return {{first, beats, true}, {second, beats, true}};
}

// Seconds of silence until two ranks in these states count as hanging, 0 for never.
int found_after(double limit, PhaseKind first, PhaseKind second, bool all_here = true) {
  Judge judge(limit, all_here);
  for (int now = 100; now < 2000; ++now) {
    if (judge.look(now, both(first, second))) return now - 100;
  }
  return 0;
}

TEST(WatchdogJudge, RanksThatNobodyWaitsForMayBeSilent) {
  EXPECT_EQ(found_after(100, PhaseKind::kSpan, PhaseKind::kSpan), 0);
}

TEST(WatchdogJudge, AWaitEndsAtTheLimit) {
  EXPECT_EQ(found_after(100, PhaseKind::kWait, PhaseKind::kSpan), 101);
  EXPECT_EQ(found_after(100, PhaseKind::kBlocked, PhaseKind::kBlocked), 101);
}

TEST(WatchdogJudge, RanksThatWaitForEachOtherEndSooner) {
  EXPECT_EQ(found_after(300, PhaseKind::kWait, PhaseKind::kWait), 31);
  EXPECT_EQ(found_after(50, PhaseKind::kWait, PhaseKind::kEnd), 11);
  EXPECT_EQ(found_after(3, PhaseKind::kWait, PhaseKind::kWait), 4);
  EXPECT_EQ(found_after(300, PhaseKind::kWait, PhaseKind::kWait, false),
            301);  // others may compute elsewhere
}

TEST(WatchdogJudge, AMachineWhoseRanksAllWaitSpeaksLater) {
  const auto speaks = [](PhaseKind second) {
    Judge judge(3, /*all_here=*/false);
    judge.look(0, both(PhaseKind::kWait, second));
    return judge.look(3.25, both(PhaseKind::kWait, second)).has_value();
  };
  EXPECT_FALSE(speaks(PhaseKind::kWait));
  EXPECT_TRUE(speaks(PhaseKind::kSpan));
}

TEST(WatchdogJudge, WorkAndTheEndHaveMoreTime) {
  EXPECT_EQ(found_after(100, PhaseKind::kWork, PhaseKind::kWait), 301);
  EXPECT_EQ(found_after(100, PhaseKind::kEnd, PhaseKind::kSpan), 301);
}

TEST(WatchdogJudge, ProgressOfAnyRankStartsTheTimeAgain) {
  Judge judge(10, true);
  EXPECT_FALSE(judge.look(100, both(PhaseKind::kWait, PhaseKind::kSpan, 1)));
  EXPECT_FALSE(judge.look(109, both(PhaseKind::kWait, PhaseKind::kSpan, 2)));
  EXPECT_FALSE(judge.look(118, both(PhaseKind::kWait, PhaseKind::kSpan, 2)));
  judge.start_again();
  EXPECT_FALSE(judge.look(125, both(PhaseKind::kWait, PhaseKind::kSpan, 2)));
  EXPECT_TRUE(judge.look(136, both(PhaseKind::kWait, PhaseKind::kSpan, 2)));
}

TEST(WatchdogJudge, AMissingRankIsWaitedForAndNoDeadlock) {
  Judge judge(100, true);
  std::vector<Sample> ranks{{PhaseKind::kWait, 1, true}, {}};
  EXPECT_FALSE(judge.look(0, ranks));
  EXPECT_FALSE(judge.look(99, ranks));
  EXPECT_TRUE(judge.look(101, ranks));
}

TEST(WatchdogBoard, FramesNestAndTheStrongestDecides) {
  const auto board = empty_board(2);
  Slot& slot = board->slot(1);
  EXPECT_EQ(doing(slot), "the program's own code");
  slot.enter("saving", PhaseKind::kWork);
  slot.enter("halo", PhaseKind::kSpan);
  EXPECT_EQ(slot.kind(), PhaseKind::kWork);
  EXPECT_EQ(slot.activity(), PhaseKind::kSpan);
  EXPECT_EQ(doing(slot), "saving: halo");
  slot.leave();
  slot.leave();
  EXPECT_EQ(slot.kind(), PhaseKind::kSpan);
  slot.leave();  // one too many has no effect
  EXPECT_EQ(slot.open_frames(), 0U);
}

TEST(WatchdogBoard, AWaitInsideOfACallIsAWait) {
  const auto board = empty_board(1);
  Slot& slot = board->slot(0);
  slot.enter("halo", PhaseKind::kBlocked);
  EXPECT_EQ(slot.kind(), PhaseKind::kBlocked);
  slot.enter("messages", PhaseKind::kWait);
  EXPECT_EQ(slot.kind(), PhaseKind::kWait);
  slot.leave();
  slot.leave();
  slot.enter("the end of the program", PhaseKind::kEnd);
  slot.enter("a barrier", PhaseKind::kWait);
  EXPECT_EQ(slot.kind(), PhaseKind::kEnd);
  EXPECT_EQ(slot.activity(), PhaseKind::kEnd);
}

TEST(WatchdogBoard, AWaitInsideOfLongWorkIsAWaitWithMoreTime) {
  const auto board = empty_board(1);
  Slot& slot = board->slot(0);
  slot.enter("state_dict()", PhaseKind::kWait);
  slot.enter("saving", PhaseKind::kWork);
  EXPECT_EQ(slot.activity(), PhaseKind::kSpan);
  slot.enter("an all-gather", PhaseKind::kWait);
  EXPECT_EQ(slot.kind(), PhaseKind::kWork);
  EXPECT_EQ(slot.activity(), PhaseKind::kWait);
  // No initializers: GCC 12 would warn about its own clean-up after exceptions.
  const ProcessState runs{'R', "", false};
  const Finding found{0, 11, runs, ""};
  const std::string text = describe({1, true, 1, "n07", 2}, *board, {found}, 6, "");
  EXPECT_NE(text.find("waits for other ranks: step 0, phase 'state_dict(): saving: an all-gather'"),
            std::string::npos)
      << text;
}

TEST(WatchdogBoard, DeepAndLongThingsAreCut) {
  const auto board = empty_board(1);
  Slot& slot = board->slot(0);
  const std::string name(100, 'x');
  for (int i = 0; i < 20; ++i) slot.enter(name, PhaseKind::kWait);
  EXPECT_EQ(slot.open_frames(), kFrames);
  EXPECT_EQ(slot.frames[0].name.load(), name.substr(0, 48));
  for (int i = 0; i < 20; ++i) slot.leave();
  slot.enter("y", PhaseKind::kWait);
  EXPECT_EQ(doing(slot), "y");
}

TEST(WatchdogBoard, ReadersAndAWriterNeedNoLock) {
  const auto board = empty_board(1);
  std::atomic<bool> over{false};
  std::thread writer([&] {
    for (int i = 0; i < 20000; ++i) {
      board->slot(0).enter(i % 2 ? "halo" : "statistics of a norm", PhaseKind::kWait);
      board->slot(0).leave();
    }
    over = true;
  });
  while (!over) {
    EXPECT_LE(doing(board->slot(0)).size(), 48U);
    static_cast<void>(board->slot(0).kind());
  }
  writer.join();
  EXPECT_EQ(board->slot(0).beats.load(), 40000U);
}

TEST(WatchdogReport, NamesRanksPhasesAndThoseThatNeverCame) {
  const auto board = empty_board(3);
  board->slot(0).pid = 11;
  board->slot(1).pid = 12;
  board->slot(0).enter("an all-reduce", PhaseKind::kWait);
  board->slot(1).step = 7;
  board->slot(0).layer.store("enc.conv1");
  board->slot(0).call.store("call 7 of all ranks: barrier");
  const std::string stack = "Thread 1 (most recent call first):\n  File \"a.py\"\n";
  const ProcessState sleeps{'S', "", false};
  const ProcessState stops{'T', "do_signal_stop", false};
  const Finding waits{0, 11, sleeps, stack};
  const Finding stopped{1, 12, stops, ""};
  const std::string text =
      describe({3, true, 3, "n07", 2}, *board, {waits, stopped}, 2.5, "rank 9 waits\nrank 10 too");
  EXPECT_EQ(
      text,
      "pydist: hang: no rank of n07 has made progress for 2.5 s (PYDIST_HANG_LIMIT=2); the job "
      "ends with code 72\n"
      "  has not reached pydist.init: rank 2\n"
      "  rank 1 (host n07, process 12) is stopped (state T in do_signal_stop): step 7, phase "
      "'the program's own code'\n"
      "  rank 0 (host n07, process 11) waits for other ranks: step 0, phase 'an all-reduce', "
      "layer enc.conv1, in call 7 of all ranks: barrier\n"
      "  rank 9 waits\n"
      "  rank 10 too\n"
      "[rank 0] Thread 1 (most recent call first):\n"
      "[rank 0]   File \"a.py\"\n");
}

TEST(WatchdogReport, LeavesIdleThreadsOutAndFindsDebuggers) {
  const std::string idle =
      "Thread 1 (most recent call first):\n  File \"x/pydist/launch/launcher_socket.py\", line "
      "6\n\n";
  const std::string busy = "Current thread 2 (most recent call first):\n  File \"user.py\"\n";
  const std::string pool = "  File \"concurrent/futures/thread.py\", line 81 in _worker\n";
  const std::string unused = "Thread 3 (most recent call first):\n" + pool;
  const std::string used = "Thread 4 (most recent call first):\n  File \"reader.py\"\n" + pool;
  const std::string user = "Thread 5 (most recent call first):\n  File \"a.py\" in _worker\n";
  EXPECT_EQ(busy_threads(idle + busy + unused + used + user), busy + used + user);
  EXPECT_FALSE(in_debugger(busy));
  EXPECT_TRUE(in_debugger("  File \"/usr/lib/python3.11/bdb.py\", line 1 in wait"));
}

std::atomic<int> stacks_at_once{0}, stacks_seen{0}, most_at_once{0};
std::atomic<bool> main_came_first{false};
pthread_t first_thread;

void count_stack(int) {
  if (stacks_seen.fetch_add(1) == 0) main_came_first = pthread_equal(pthread_self(), first_thread);
  most_at_once = std::max(most_at_once.load(), ++stacks_at_once);
  for (int i = 0; i < 100; ++i) sched_yield();
  --stacks_at_once;
}

TEST(WatchdogStacks, EachThreadThatTakesTheSignalWritesItsOwnAlone) {
  const int number = SIGRTMIN + 12;
  first_thread = pthread_self();
  struct sigaction action = {};
  action.sa_handler = count_stack;
  ASSERT_EQ(sigaction(number, &action, nullptr), 0);
  serve_stacks(number);
  serve_stacks(number);        // a second watchdog's call has no effect
  constexpr int kThreads = 6;  // the last of them blocks the signal
  std::atomic<bool> over{false};
  std::atomic<int> started{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      sigset_t all;
      sigfillset(&all);
      if (i == kThreads - 1) pthread_sigmask(SIG_SETMASK, &all, nullptr);
      ++started;
      while (!over) sched_yield();
    });
  }
  while (started < kThreads) sched_yield();
  ask_for_stacks(number, first_thread);
  for (int i = 0; i < 20000 && stacks_seen < kThreads; ++i) usleep(100);
  EXPECT_EQ(stacks_seen, kThreads);  // all except the blocking one, and the main thread
  EXPECT_EQ(most_at_once, 1);
  EXPECT_TRUE(main_came_first);
  over = true;
  for (std::thread& each : threads) each.join();
  signal(number, SIG_DFL);
}

TEST(WatchdogReport, QuotesAsJson) { EXPECT_EQ(quoted("a\"b\\c\n\x01"), R"("a\"b\\c\n\u0001")"); }

TEST(WatchdogProcess, KnowsItsOwnState) {
  const ProcessState state = state_of(getpid());
#if defined(__linux__)
  EXPECT_EQ(state.letter, 'R');
#endif
  EXPECT_FALSE(state.is_gone());
  EXPECT_TRUE(state_of(0x3FFFFFFF).is_gone());
}

TEST(WatchdogProcess, WritesAllThatFitsAndGivesUpOnAFullPipe) {
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  write_all(pipe_ends[1], std::string(1 << 20, 'x'));  // returns without a reader
  char byte = 0;
  EXPECT_EQ(read(pipe_ends[0], &byte, 1), 1);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

}  // namespace
}  // namespace pydist::watchdog
