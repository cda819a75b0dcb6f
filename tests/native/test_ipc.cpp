// Exchanges by copies between ranks that map each other's memory, with the recorder
// (driver_recorder.cpp): order of flags and copies, reuse of buffers, errors. Ranks are threads
// here; the sanitizers use this test to find races and leaks.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/ipc/channel.hpp"
#include "core/errors.hpp"

namespace pydist::comm {
namespace {

constexpr std::size_t kBlock = 1 << 16;

std::shared_ptr<const CudaDriver> driver() {
  static const auto opened = std::make_shared<CudaDriver>(PYDIST_NCCL_RECORDER);
  return opened;
}

void set_delay(long microseconds) {
  void (*delay)(long) = nullptr;
  driver()->library().find("recorder_delay", delay);
  delay(microseconds);
}

std::byte* bytes(std::vector<int>& values) { return reinterpret_cast<std::byte*>(values.data()); }

struct Rank {
  explicit Rank(int number, int size)
      : memory(std::make_shared<IpcMemory>(driver(), 0, kBlock)),
        group(std::make_shared<IpcGroup>(memory, number, size)) {}

  std::shared_ptr<IpcMemory> memory;
  std::shared_ptr<IpcGroup> group;
};

// The role of the host transport: every peer gets the other's offer.
void introduce(std::vector<std::unique_ptr<IpcChannel>>& channels) {
  for (int rank = 0; rank < static_cast<int>(channels.size()); ++rank) {
    for (const int peer : channels[static_cast<std::size_t>(rank)]->peers()) {
      channels[static_cast<std::size_t>(rank)]->accept(
          peer, channels[static_cast<std::size_t>(peer)]->offer(rank));
    }
  }
}

// Keeps a stream busy for a number of operations, each late by the recorder's delay.
void idle(const IpcDriver& driver, int operations, void* stream) {
  static std::vector<int> nothing(1);
  for (int i = 0; i < operations; ++i) driver.copy(bytes(nothing), bytes(nothing), 0, stream);
}

// All ranks send to all others. Sent values are late on the caller's stream; a rank's rounds follow
// each other on streams, and its host never waits.
TEST(Ipc, RoundsFollowEachOtherOnStreamsAlone) {
  constexpr int kSize = 3, kRounds = 8;
  set_delay(50);
  std::vector<Rank> ranks;
  std::vector<std::vector<int>> sent(kSize, std::vector<int>(1)), received(kSize);
  std::vector<std::vector<std::vector<int>>> kept(kSize);
  std::vector<std::unique_ptr<IpcChannel>> channels, keepers;
  std::vector<std::unique_ptr<IpcGroup>> callers;
  for (int rank = 0; rank < kSize; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    ranks.emplace_back(rank, kSize);
    received[at].resize(kSize, -1);
    kept[at].assign(kRounds, std::vector<int>(kSize, -1));
    IpcChannel::Messages sends, receives;
    for (int peer = 0; peer < kSize; ++peer) {
      sends.push_back({peer, bytes(sent[at]), sizeof(int)});
      receives.push_back(
          {peer, bytes(received[at]) + sizeof(int) * static_cast<std::size_t>(peer), sizeof(int)});
    }
    channels.push_back(std::make_unique<IpcChannel>(ranks[at].group, sends, receives));
    callers.push_back(std::make_unique<IpcGroup>(ranks[at].memory, 0, 1));
  }
  introduce(channels);
  std::vector<std::vector<int>> values(kRounds, std::vector<int>(1));
  for (int round = 0; round < kRounds; ++round) values[static_cast<std::size_t>(round)][0] = round;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      const auto at = static_cast<std::size_t>(rank);
      void* caller = callers[at]->stream().handle();
      const IpcDriver& copies = ranks[at].memory->driver();
      for (std::size_t round = 0; round < kRounds; ++round) {
        idle(copies, 40, caller);
        copies.copy(bytes(sent[at]), bytes(values[round]), sizeof(int), caller);
        channels[at]->start(caller);
        channels[at]->issue();
        channels[at]->wait(caller);
        copies.copy(bytes(kept[at][round]), bytes(received[at]), sizeof(int) * kSize, caller);
      }
      callers[at]->rest(20);
      ranks[at].group->rest(20);
    });
  }
  for (std::thread& each : threads) each.join();
  for (const auto& of_rank : kept) {
    for (int round = 0; round < kRounds; ++round) {
      EXPECT_EQ(of_rank[static_cast<std::size_t>(round)], std::vector<int>(kSize, round));
    }
  }
  channels.clear();
  for (Rank& each : ranks) each.memory->unmap();
  for (Rank& each : ranks) each.memory->release();
  set_delay(0);
}

// One rank only sends, and is far ahead of the other, which only receives.
TEST(Ipc, NothingIsWrittenBeforeItsReceiverIsDone) {
  constexpr std::size_t kRounds = 8;
  set_delay(50);
  const Rank ahead(0, 2), behind(1, 2);
  std::vector<int> sent(1), received(1);
  std::vector<std::vector<int>> values(kRounds, std::vector<int>(1)), kept = values;
  std::vector<std::unique_ptr<IpcChannel>> channels;
  channels.push_back(std::make_unique<IpcChannel>(
      ahead.group, IpcChannel::Messages{{1, bytes(sent), sizeof(int)}}, IpcChannel::Messages{}));
  channels.push_back(
      std::make_unique<IpcChannel>(behind.group, IpcChannel::Messages{},
                                   IpcChannel::Messages{{0, bytes(received), sizeof(int)}}));
  introduce(channels);
  IpcGroup of_ahead(ahead.memory, 0, 1), of_behind(behind.memory, 0, 1);
  for (std::size_t round = 0; round < kRounds; ++round) {
    values[round][0] = static_cast<int>(round) + 1;
    void* caller = of_ahead.stream().handle();
    ahead.memory->driver().copy(bytes(sent), bytes(values[round]), sizeof(int), caller);
    channels[0]->start(caller);
    channels[0]->issue();
    channels[0]->wait(caller);
  }
  for (std::size_t round = 0; round < kRounds; ++round) {
    void* caller = of_behind.stream().handle();
    idle(behind.memory->driver(), 60, caller);
    channels[1]->start(caller);
    channels[1]->issue();
    channels[1]->wait(caller);
    behind.memory->driver().copy(bytes(kept[round]), bytes(received), sizeof(int), caller);
  }
  of_behind.rest(20);
  of_ahead.rest(20);
  EXPECT_EQ(kept, values);
  channels.clear();
  for (const Rank* each : {&ahead, &behind}) each->memory->unmap();
  for (const Rank* each : {&ahead, &behind}) each->memory->release();
  set_delay(0);
}

TEST(Ipc, LongMessagesGetBlocksOfTheirOwnAndShortOnesShareThem) {
  const Rank rank(0, 2);
  const IpcAllocation small = rank.memory->take_buffer(100, rank.group->stream());
  const IpcAllocation large = rank.memory->take_buffer(3 * kBlock, rank.group->stream());
  const IpcAllocation next = rank.memory->take_buffer(100, rank.group->stream());
  EXPECT_EQ(next.address, small.address + 256);
  EXPECT_EQ(next.place.offset, small.place.offset + 256);
  EXPECT_EQ(large.bytes, 3 * kBlock);
  EXPECT_NE(large.place.block, small.place.block);
  rank.memory->recycle({}, small, nullptr);
  EXPECT_EQ(rank.memory->take_buffer(99, rank.group->stream()).address, small.address);
  rank.memory->release();
}

TEST(Ipc, ShortMessagesShareNoBlockWithALongOneThatWasFirst) {
  const Rank rank(0, 2);
  const IpcAllocation large = rank.memory->take_buffer(3 * kBlock, rank.group->stream());
  const IpcAllocation small = rank.memory->take_buffer(100, rank.group->stream());
  EXPECT_NE(small.place.block, large.place.block);
  EXPECT_EQ(rank.memory->take_buffer(100, rank.group->stream()).address, small.address + 256);
  rank.memory->release();
}

TEST(Ipc, WhoComesSecondSeesThatTheFirstStartedAnother) {
  IpcOrder one(1, 3), two(2, 3);
  one.meet(2, two.place());
  two.meet(1, one.place());
  const std::uint32_t a1 = one.new_channel(), b1 = one.new_channel();
  two.new_channel();
  const std::uint32_t a2 = two.new_channel(), b2 = two.new_channel();
  for (std::uint32_t round = 0; round < 2 * IpcOrder::kKept; ++round) {
    const bool ahead = round % 3 == 0;  // either rank may be first
    const bool first = !ahead || one.note(2, a1, a2);
    EXPECT_TRUE(first && two.note(1, a2, a1));
    EXPECT_TRUE(ahead || one.note(2, a1, a2));
  }
  EXPECT_TRUE(one.note(2, a1, a2));
  EXPECT_TRUE(one.note(2, b1, b2));  // far ahead
  EXPECT_FALSE(two.note(1, b2, b1));
  EXPECT_FALSE(two.note(1, a2, a1));
  EXPECT_TRUE(two.note(0, a2, 1)) << "rank 0 has not been met";
}

TEST(Ipc, NotesOfAnotherProcessAreNotTakenForAPeers) {
  IpcOrder own(0, 2), other(1, 2);
  IpcNotesFile place = other.place();
  EXPECT_TRUE(other.note(0, 5, 1));
  place.key ^= 1;
  own.meet(1, place);
  EXPECT_TRUE(own.note(1, 1, 2));
}

TEST(Ipc, MessagesThatDoNotMatchAreRefused) {
  const Rank zero(0, 2), one(1, 2);
  std::vector<int> buffer(4);
  IpcChannel sends(zero.group, {{1, bytes(buffer), 8}}, {});
  IpcChannel expects(one.group, {}, {{0, bytes(buffer), 8}, {0, bytes(buffer), 4}});
  EXPECT_THROW(sends.accept(1, expects.offer(0)), UsageError);
  EXPECT_THROW(expects.accept(0, sends.offer(1)), UsageError);
  EXPECT_THROW(IpcChannel(zero.group, {{2, bytes(buffer), 8}}, {}), UsageError);
  EXPECT_THROW(IpcChannel(zero.group, {{0, bytes(buffer), 8}}, {}), UsageError);
  zero.memory->release();
  one.memory->release();
}

}  // namespace
}  // namespace pydist::comm
