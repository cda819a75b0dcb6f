// Exchanges by copies between ranks that map each other's memory, against the recorder
// (driver_recorder.cpp): order of flags and copies, reuse of buffers, errors. Ranks are threads
// here; under the sanitizers this is what looks for races and leaks.
#include <gtest/gtest.h>

#include <barrier>
#include <string>
#include <thread>
#include <vector>

#include "comm/ipc_channel.hpp"
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

// What the transport of hosts does: every peer gets the other's offer.
void introduce(std::vector<std::unique_ptr<IpcChannel>>& channels) {
  for (int rank = 0; rank < static_cast<int>(channels.size()); ++rank) {
    for (const int peer : channels[static_cast<std::size_t>(rank)]->peers()) {
      channels[static_cast<std::size_t>(rank)]->accept(
          peer, channels[static_cast<std::size_t>(peer)]->offer(rank));
    }
  }
}

// All ranks send to all others, from buffers of one int to those of as many; the rounds of one rank
// follow each other without waiting for those of another one, nor for its own.
TEST(Ipc, RoundsFollowEachOtherOnStreamsAlone) {
  constexpr int kSize = 3, kRounds = 20;
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

TEST(Ipc, LongMessagesGetBlocksOfTheirOwnAndShortOnesShareThem) {
  const Rank rank(0, 2);
  const IpcPiece small = rank.memory->take_buffer(100, rank.group->stream());
  const IpcPiece large = rank.memory->take_buffer(3 * kBlock, rank.group->stream());
  const IpcPiece next = rank.memory->take_buffer(100, rank.group->stream());
  EXPECT_EQ(next.address, small.address + 256);
  EXPECT_EQ(next.place.offset, small.place.offset + 256);
  EXPECT_EQ(large.bytes, 3 * kBlock);
  EXPECT_NE(large.place.block, small.place.block);
  rank.memory->give_back({}, small, nullptr);
  EXPECT_EQ(rank.memory->take_buffer(99, rank.group->stream()).address, small.address);
  rank.memory->release();
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
