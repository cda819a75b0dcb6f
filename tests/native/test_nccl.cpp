// The communicator with the recorder (nccl_recorder.cpp), which is not NCCL: order of events,
// matching of messages, errors. The sanitizers use this test to find races and leaks.
#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/communicator.hpp"

namespace pydist::comm {
namespace {

constexpr NcclLimits kLimits{10, 10};

std::shared_ptr<const NcclLibrary> library() {
  static const auto opened =
      std::make_shared<NcclLibrary>(std::vector<std::string>{PYDIST_NCCL_RECORDER}, false);
  return opened;
}

std::shared_ptr<const CudaDriver> driver() {
  static const auto opened = std::make_shared<CudaDriver>(PYDIST_NCCL_RECORDER);
  return opened;
}

void set_delay(long microseconds) {
  const DynamicLibrary recorder("the recorder", "", {PYDIST_NCCL_RECORDER});
  void (*delay)(long) = nullptr;
  recorder.find("recorder_delay", delay);
  delay(microseconds);
}

std::byte* bytes(std::vector<float>& values) { return reinterpret_cast<std::byte*>(values.data()); }

// Runs body(communicator, rank) on a thread per rank.
template <class Body>
void on_ranks(int size, Body body) {
  const NcclUniqueId id = library()->unique_id();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      NcclCommunicator group(library(), driver(), id, rank, size, 0, kLimits);
      body(group, rank);
      group.close();
    });
  }
  for (std::thread& each : threads) each.join();
}

TEST(Nccl, VersionsAreShownAsTheyAreWritten) {
  EXPECT_EQ(version_text(23203), "2.32.3");
  EXPECT_EQ(version_text(21400), "2.14.0");
  EXPECT_EQ(version_text(2708), "2.7.8");
  EXPECT_EQ(library()->version(), 23203);
}

TEST(Nccl, MissingLibrariesAndSymbolsAreNamed) {
  EXPECT_THROW(NcclLibrary({"/nowhere/libnccl.so.2"}, false), LibraryMissing);
  const DynamicLibrary recorder("the recorder", "", {PYDIST_NCCL_RECORDER});
  void (*function)() = nullptr;
  try {
    recorder.find("ncclNothing", function);
    FAIL();
  } catch (const LibraryMissing& error) {
    EXPECT_EQ(error.what(), std::string("the recorder (") + PYDIST_NCCL_RECORDER +
                                ") has no function ncclNothing");
  }
}

// A late stream of the caller: sent values are only written when the stream executes the write, and
// received values are read after it. Without events in both directions, the values would differ.
TEST(Nccl, AnExchangeComesBetweenWhatTheCallersStreamDoes) {
  set_delay(2000);
  on_ranks(2, [](NcclCommunicator& group, int rank) {
    const Stream caller(group.context());
    std::vector<float> input{1.F + static_cast<float>(rank), 5.F}, sent(2, -1.F), received(2, -1.F),
        read(2, -1.F);
    const auto done = std::make_shared<Event>(group.context());
    const auto copied = std::make_shared<Event>(group.context());
    // The recorder has no kernels: exchanges of this rank with itself copy on `caller`.
    NcclCommunicator self(library(), driver(), library()->unique_id(), 0, 1, 0, kLimits);
    self.exchange({{0, bytes(input), 8}}, {{0, bytes(sent), 8}}, 0, caller.handle(), copied);
    self.wait(copied, caller.handle());
    group.exchange({{1 - rank, bytes(sent), 8}}, {{1 - rank, bytes(received), 8}}, 0,
                   caller.handle(), done);
    EXPECT_FALSE(group.reached(done));  // the host does not wait
    group.wait(done, caller.handle());
    self.exchange({{0, bytes(received), 8}}, {{0, bytes(read), 8}}, 0, caller.handle(), copied);
    self.wait(copied, nullptr);  // this thread's own stream
    EXPECT_EQ(read, (std::vector<float>{2.F - static_cast<float>(rank), 5.F}));
    self.close();
  });
  set_delay(0);
}

TEST(Nccl, UnevenSlicesTravelInOneGroup) {
  on_ranks(3, [](NcclCommunicator& group, int rank) {
    const std::vector<std::size_t> counts{2, 0, 3};
    std::vector<float> row(5), own(counts[static_cast<std::size_t>(rank)]);
    for (std::size_t i = 0; i < row.size(); ++i) {
      row[i] = static_cast<float>(10 * rank) + static_cast<float>(i);
    }
    const auto done = std::make_shared<Event>(group.context());
    group.reduce_scatter(bytes(row), counts, 4, NcclType::kFloat32, bytes(own), nullptr, done);
    group.wait(done, nullptr);
    std::vector<float> gathered(5, -1.F);
    const std::size_t start = rank == 2 ? 2 : 0;
    if (!own.empty()) std::memcpy(gathered.data() + start, own.data(), 4 * own.size());
    group.all_gather(bytes(gathered), {8, 0, 12}, nullptr, done);
    group.wait(done, nullptr);
    EXPECT_EQ(gathered, (std::vector<float>{30.F, 33.F, 36.F, 39.F, 42.F}));
  });
}

// Connecting waits for the other rank. A host that waited for the connection when it starts an
// operation would never start the operation that the other rank waits for.
TEST(Nccl, RanksMayUseTwoGroupsInDifferentOrders) {
  const NcclUniqueId second = library()->unique_id();
  on_ranks(2, [&](NcclCommunicator& first, int rank) {
    NcclCommunicator other(library(), driver(), second, rank, 2, 0, kLimits);
    std::vector<float> a{1.F}, b{2.F};
    const auto done = std::make_shared<Event>(first.context());
    const auto other_done = std::make_shared<Event>(other.context());
    const auto reduce = [](NcclCommunicator& group, std::vector<float>& x, const auto& event) {
      group.all_reduce(bytes(x), 1, NcclType::kFloat32, NcclOp::kSum, nullptr, event);
    };
    if (rank == 0) {
      reduce(first, a, done);
      reduce(other, b, other_done);
      other.wait(other_done, nullptr);
    } else {
      reduce(other, b, other_done);
      other.wait(other_done, nullptr);
      reduce(first, a, done);
    }
    first.wait(done, nullptr);
    EXPECT_EQ(a[0] + b[0], 6.F);
    other.close();
  });
}

TEST(Nccl, AnAbortEndsAnExchangeThatNobodyAnswers) {
  std::barrier connected(2);
  on_ranks(2, [&](NcclCommunicator& group, int rank) {
    connected.arrive_and_wait();
    if (rank == 1) return group.abort();
    std::vector<float> values(2);
    const auto done = std::make_shared<Event>(group.context());
    EXPECT_THROW(
        {
          for (int i = 0; i < 2; ++i) {
            group.exchange({}, {{1, bytes(values), 8}}, 0, nullptr, done);
            group.wait(done, nullptr);
          }
        },
        GroupError);
  });
}

TEST(Nccl, AConnectionHasATimeLimit) {
  try {
    const NcclCommunicator group(library(), driver(), library()->unique_id(), 0, 2, 0, {0.02, 1});
    FAIL();
  } catch (const GroupError& error) {
    EXPECT_EQ(error.fault(), GroupError::Fault::kTimeout);
  }
}

}  // namespace
}  // namespace pydist::comm
