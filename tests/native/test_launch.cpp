// The launchers: errors that the emulator finds, and the thread pool.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cmath>
#include <new>
#include <thread>
#include <vector>

#include "core/errors.hpp"
#include "launch/cpu.hpp"
#include "launch/emulate.hpp"

namespace pydist::launch {
namespace {

// Each thread of a block sums its neighbor's element. `kRacy` reads it in the same phase as the
// write, like a missing barrier.
template <bool kRacy>
struct NeighborSum {
  static constexpr int kThreads = 8;
  struct Shared {
    double value[kThreads];
  };
  struct Thread {
    double sum;
  };
  const double* in;
  double* out;
  index_t count;

  index_t blocks() const { return 1; }
  index_t steps(index_t) const { return count / kThreads; }
  void begin(index_t, int, Thread& state) const { state.sum = 0; }
  void load(index_t, index_t step, int thread, Thread& state, Shared& shared) const {
    shared.value[thread] = in[step * kThreads + thread];
    if constexpr (kRacy) add(thread, shared, state);
  }
  void compute(int thread, const Shared& shared, Thread& state) const {
    if constexpr (!kRacy) add(thread, shared, state);
  }
  void end(index_t, int thread, const Thread& state) const { out[thread] = state.sum; }

  static void add(int thread, const Shared& shared, Thread& state) {
    state.sum += shared.value[(thread + 1) % kThreads];
  }
};

template <bool kRacy>
std::vector<double> neighbor_sums(ThreadOrder order) {
  std::vector<double> in(32), out(8);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<double>(i);
  emulate_tiles(NeighborSum<kRacy>{in.data(), out.data(), 32}, order);
  return out;
}

TEST(Emulator, RunsPhasesOfAllThreadsInTurn) {
  const std::vector<double> expected{52, 56, 60, 64, 68, 72, 76, 48};
  for (const ThreadOrder order : kThreadOrders) {
    EXPECT_EQ(neighbor_sums<false>(order), expected);
  }
}

TEST(Emulator, ShowsAMissingBarrierInEveryOrder) {
  for (const ThreadOrder order : kThreadOrders) {
    const std::vector<double> sums = neighbor_sums<true>(order);
    EXPECT_TRUE(std::any_of(sums.begin(), sums.end(), [](double x) { return std::isnan(x); }));
  }
}

TEST(Emulator, VisitsEachThreadOnceInEachOrder) {
  for (const ThreadOrder order : kThreadOrders) {
    std::vector<int> visits(50);
    in_order(order, 50, [&](index_t i) { ++visits[static_cast<std::size_t>(i)]; });
    EXPECT_EQ(visits, std::vector<int>(50, 1));
  }
}

TEST(LaneLoop, ReadsAheadOfWhatItWrites) {
  for (const int lanes : {1, 4, 32}) {
    for (const index_t count : {0, 1, 7, 31, 32, 33, 200}) {
      std::vector<int> writes(static_cast<std::size_t>(count));
      int ahead = 0, most = 0;
      for (int lane = 0; lane < lanes; ++lane) {
        LaneLoop{lane, lanes}(count, Move{[&](index_t j) {
                                            most = std::max(most, ++ahead);
                                            return std::array<index_t, 2>{j, -j};
                                          },
                                          [&](index_t j, const std::array<index_t, 2>& read) {
                                            --ahead;
                                            EXPECT_EQ(read[0], j);
                                            ++writes[static_cast<std::size_t>(j)];
                                          }});
      }
      EXPECT_EQ(writes, std::vector<int>(static_cast<std::size_t>(count), 1));
      EXPECT_EQ(most, std::min<index_t>(ceil_div(count, lanes), 4));  // 64 bytes
    }
  }
}

TEST(RunGrid, GivesShortRunsFewLanes) {
  EXPECT_EQ(run_grid(10, 1).lanes, 1);
  EXPECT_EQ(run_grid(10, 5).lanes, 8);
  EXPECT_EQ(run_grid(10, 1000).lanes, 32);
  EXPECT_EQ(run_grid(10, 1000).blocks, 2);
  EXPECT_EQ(run_grid(index_t{1} << 40, 1000).blocks, kMaxRunBlocks);
}

class ThreadPool : public ::testing::Test {
 protected:
  void SetUp() override { set_num_threads(4); }
  void TearDown() override { set_num_threads(before_); }

 private:
  const int before_ = num_threads();
};

TEST_F(ThreadPool, RunsEachTaskOnce) {
  for (const index_t count : {0, 1, 3, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
    parallel_for(count, 1, [&](index_t i) { ++runs[static_cast<std::size_t>(i)]; });
    for (const auto& n : runs) EXPECT_EQ(n.load(), 1);
  }
}

TEST_F(ThreadPool, ServesSeveralCallersAtOnce) {
  std::vector<std::thread> callers;
  std::atomic<index_t> total{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        std::atomic<index_t> sum{0};
        parallel_for(100, 1, [&](index_t i) { sum += i; });
        total += sum;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total.load(), 4 * 50 * 4950);
}

TEST_F(ThreadPool, ThrowsWhatATaskThrows) {
  for (const index_t bad : {0, 50, 99}) {
    std::atomic<index_t> runs{0};
    const auto body = [&](index_t i) {
      ++runs;
      if (i >= bad) throw std::bad_alloc();
    };
    EXPECT_THROW(parallel_for(100, 1, body), std::bad_alloc);
    EXPECT_LE(runs.load(), bad + 4);  // threads that had begun another task
  }
  std::atomic<index_t> sum{0};
  parallel_for(100, 1, [&](index_t i) { sum += i; });
  EXPECT_EQ(sum.load(), 4950);
}

TEST_F(ThreadPool, WorksInAForkedChild) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer can't follow a fork";
#endif
  std::atomic<index_t> sum{0};
  parallel_for(100, 1, [&](index_t i) { sum += i; });
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<index_t> in_child{0};
    parallel_for(100, 1, [&](index_t i) { in_child += i; });
    _exit(in_child == 4950 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST_F(ThreadPool, RefusesANumberOfThreadsBelowOne) {
  EXPECT_THROW(set_num_threads(0), UsageError);
  EXPECT_EQ(num_threads(), 4);
}

}  // namespace
}  // namespace pydist::launch
