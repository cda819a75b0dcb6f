// The local hub with threads as ranks (also under the thread sanitizer), and the reductions.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/local/hub.hpp"
#include "comm/local/reduce.hpp"
#include "core/errors.hpp"

namespace pydist::comm {
namespace {

template <class T>
Segment segment(std::vector<T>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(T)};
}

template <class T>
std::byte* bytes(std::vector<T>& values) {
  return segment(values).data;
}

// Runs body(hub, rank) on `size` threads; returns what each of them threw, or "".
std::vector<std::string> run(
    int size, const std::function<void(const std::shared_ptr<LocalHub>&, int)>& body) {
  auto hub = std::make_shared<LocalHub>(size);
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(hub, rank);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
        hub->abort("rank " + std::to_string(rank) + " failed");
      }
      hub->leave(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void expect_none(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// ---- reductions ---------------------------------------------------------------------------

template <class T>
std::vector<T> reduced(std::vector<std::vector<T>> rows, DType dtype, ReduceOp op) {
  std::vector<const std::byte*> inputs;
  for (auto& row : rows) inputs.push_back(bytes(row));
  std::vector<T> result(rows.front().size());
  std::byte* const output = bytes(result);
  reduce(inputs, {&output, 1}, result.size(), dtype, op);
  return result;
}

TEST(Reduce, CombinesInRankOrder) {
  // (1 + 1e8) - 1e8 is 0 in fp32, 1 + (1e8 - 1e8) would be 1.
  EXPECT_EQ(reduced<float>({{1.f}, {1e8f}, {-1e8f}}, DType::kFloat32, ReduceOp::kSum),
            std::vector<float>{0.f});
  EXPECT_EQ(reduced<double>({{1, -2}, {3, -5}}, DType::kFloat64, ReduceOp::kMax),
            (std::vector<double>{3, -2}));
  EXPECT_EQ(reduced<std::int64_t>({{1, -2}, {3, -5}}, DType::kInt64, ReduceOp::kMin),
            (std::vector<std::int64_t>{1, -5}));
}

TEST(Reduce, IntegersWrap) {
  constexpr auto max = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(reduced<std::int32_t>({{max}, {1}}, DType::kInt32, ReduceOp::kSum),
            std::vector<std::int32_t>{std::numeric_limits<std::int32_t>::min()});
  EXPECT_EQ(reduced<std::int8_t>({{127}, {2}}, DType::kInt8, ReduceOp::kSum),
            std::vector<std::int8_t>{-127});
}

TEST(Reduce, BoolIsAnyAndAll) {
  const std::vector<std::vector<std::uint8_t>> rows{{0, 1, 1}, {0, 0, 1}};
  EXPECT_EQ(reduced(rows, DType::kBool, ReduceOp::kSum), (std::vector<std::uint8_t>{0, 1, 1}));
  EXPECT_EQ(reduced(rows, DType::kBool, ReduceOp::kMin), (std::vector<std::uint8_t>{0, 0, 1}));
}

TEST(Reduce, ExtremaPropagateNan) {
  const float nan = std::nanf("");
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
    const auto result = reduced<float>({{nan, 1.f}, {1.f, nan}}, DType::kFloat32, op);
    EXPECT_TRUE(std::isnan(result[0]) && std::isnan(result[1]));
  }
}

// Every bit pattern passes unchanged through fp32 and back; halves between neighbors go to even.
TEST(Reduce, HalfTypesRoundToNearestEven) {
  struct Format {
    DType dtype;
    std::uint16_t infinity, step;  // step: half a unit in the last place of 1, as a half number
    std::uint16_t one;
  };
  for (const Format format : {Format{DType::kFloat16, 0x7c00, 0x1000, 0x3c00},
                              Format{DType::kBFloat16, 0x7f80, 0x3b80, 0x3f80}}) {
    std::vector<std::uint16_t> all;
    for (int bits = 0; bits < 0x10000; ++bits) all.push_back(static_cast<std::uint16_t>(bits));
    const auto same = reduced<std::uint16_t>({all}, format.dtype, ReduceOp::kSum);
    for (std::size_t i = 0; i < all.size(); ++i) {
      if ((all[i] & 0x7fff) > format.infinity) {
        EXPECT_GT(same[i] & 0x7fff, format.infinity);  // NaN stays NaN
      } else {
        EXPECT_EQ(same[i], all[i]);
      }
    }
    const std::uint16_t one = format.one, next = static_cast<std::uint16_t>(one + 1);
    const auto sums = reduced<std::uint16_t>({{one, next}, {format.step, format.step}},
                                             format.dtype, ReduceOp::kSum);
    EXPECT_EQ(sums, (std::vector<std::uint16_t>{one, static_cast<std::uint16_t>(one + 2)}));
    const auto largest = static_cast<std::uint16_t>(format.infinity - 1);
    EXPECT_EQ(reduced<std::uint16_t>({{largest}, {largest}}, format.dtype, ReduceOp::kSum),
              std::vector<std::uint16_t>{format.infinity});
  }
}

// ---- point to point -----------------------------------------------------------------------

TEST(LocalHub, MessagesKeepOrderAndTagsApart) {
  expect_none(run(4, [](const auto& hub, int rank) {
    const int next = (rank + 1) % 4, previous = (rank + 3) % 4;
    for (int number = 0; number < 100; ++number) {
      for (int tag = 0; tag < 3; ++tag) {
        std::vector<int> value{rank, tag, number};
        hub->send(LocalHub::kWorld, rank, next, tag, segment(value));
      }
    }
    for (int tag = 2; tag >= 0; --tag) {
      for (int number = 0; number < 100; ++number) {
        std::vector<int> value(3);
        hub->receive(LocalHub::kWorld, rank, previous, tag, segment(value));
        EXPECT_EQ(value, (std::vector<int>{previous, tag, number}));
      }
    }
  }));
}

TEST(LocalHub, ChannelRepeats) {
  expect_none(run(3, [](const auto& hub, int rank) {
    std::vector<int> out(2), in(2);
    LocalChannel channel(hub, LocalHub::kWorld, rank, {{(rank + 1) % 3, segment(out)}},
                         {{(rank + 2) % 3, segment(in)}}, 1);
    for (int round = 0; round < 50; ++round) {
      out = {rank, round};
      channel.start();
      channel.wait();
      EXPECT_EQ(in, (std::vector<int>{(rank + 2) % 3, round}));
    }
  }));
}

TEST(LocalHub, RefusesAMessageOfAnotherLength) {
  const auto errors = run(2, [](const auto& hub, int rank) {
    std::vector<int> value(2 + static_cast<std::size_t>(rank));
    if (rank == 0) hub->send(LocalHub::kWorld, 0, 1, 5, segment(value));
    if (rank == 1) hub->receive(LocalHub::kWorld, 1, 0, 5, segment(value));
  });
  EXPECT_EQ(errors[1], "rank 1 expects 12 bytes from rank 0, tag 5, and got 8");
}

// ---- collectives --------------------------------------------------------------------------

TEST(LocalHub, AllReducesUnderWayMayBeFinishedInAnyOrder) {
  constexpr int kRanks = 5, kRounds = 40;
  expect_none(run(kRanks, [](const auto& hub, int rank) {
    for (int round = 0; round < kRounds; ++round) {
      std::vector<std::vector<double>> buffers(3, std::vector<double>(3000, rank));
      std::vector<LocalHub::Ticket> tickets;
      for (auto& buffer : buffers) {
        tickets.push_back(hub->start_all_reduce(LocalHub::kWorld, rank, bytes(buffer),
                                                buffer.size(), DType::kFloat64, ReduceOp::kSum));
      }
      const bool backwards = rank % 2 == 0;
      for (std::size_t i = 0; i < tickets.size(); ++i) {
        hub->finish(LocalHub::kWorld, rank, tickets[backwards ? tickets.size() - 1 - i : i]);
      }
      for (auto& buffer : buffers) EXPECT_EQ(buffer, std::vector<double>(3000, 10.0));
    }
  }));
}

TEST(LocalHub, ExchangesUnevenParts) {
  constexpr int kRanks = 4;
  expect_none(run(kRanks, [](const auto& hub, int rank) {
    std::vector<std::vector<int>> out, in;
    std::vector<Segment> inputs, outputs;
    for (int peer = 0; peer < kRanks; ++peer) {
      out.emplace_back((rank + 2 * peer) % 4, 10 * rank + peer);
      in.emplace_back((peer + 2 * rank) % 4, -1);
    }
    for (auto& each : out) inputs.push_back(segment(each));
    for (auto& each : in) outputs.push_back(segment(each));
    hub->finish(LocalHub::kWorld, rank,
                hub->start_exchange(LocalHub::kWorld, rank, inputs, outputs));
    for (int peer = 0; peer < kRanks; ++peer) {
      EXPECT_EQ(in[static_cast<std::size_t>(peer)],
                std::vector<int>((peer + 2 * rank) % 4, 10 * peer + rank));
    }
  }));
}

TEST(LocalHub, GroupsWorkIndependently) {
  expect_none(run(6, [](const auto& hub, int rank) {
    const std::vector<int> members =
        rank % 2 ? std::vector<int>{5, 3, 1} : std::vector<int>{0, 2, 4};
    const auto group = hub->subgroup(LocalHub::kWorld, 1, members);
    const int index = rank % 2 ? (5 - rank) / 2 : rank / 2;
    for (int round = 0; round < 10 * (1 + rank % 2); ++round) {
      std::vector<std::int32_t> value{rank};
      hub->finish(
          group, index,
          hub->start_all_reduce(group, index, bytes(value), 1, DType::kInt32, ReduceOp::kSum));
      EXPECT_EQ(value[0], rank % 2 ? 9 : 6);
    }
  }));
}

TEST(LocalHub, NamesCollectivesThatDiffer) {
  const auto errors = run(2, [](const auto& hub, int rank) {
    std::vector<float> value(static_cast<std::size_t>(2 + rank));
    hub->finish(LocalHub::kWorld, rank,
                hub->start_all_reduce(LocalHub::kWorld, rank, bytes(value), value.size(),
                                      DType::kFloat32, ReduceOp::kSum));
  });
  // One of the two may notice it through the failure of the other.
  const std::string all = errors[0] + errors[1];
  EXPECT_NE(all.find("all_reduce of 2 elements of float32"), std::string::npos);
  EXPECT_NE(all.find("all_reduce of 3 elements of float32"), std::string::npos);
}

// ---- failures -----------------------------------------------------------------------------

TEST(LocalHub, AFailureReleasesAllThatWait) {
  const auto errors = run(4, [](const auto& hub, int rank) {
    std::vector<double> value(100000, rank);
    if (rank == 3) throw std::runtime_error("first");
    if (rank == 2) hub->receive(LocalHub::kWorld, rank, 0, 0, segment(value));
    hub->finish(LocalHub::kWorld, rank,
                hub->start_all_reduce(LocalHub::kWorld, rank, bytes(value), value.size(),
                                      DType::kFloat64, ReduceOp::kSum));
  });
  EXPECT_EQ(errors[3], "first");
  for (std::size_t rank = 0; rank < 3; ++rank) EXPECT_NE(errors[rank], "");
}

// Buffers of a rank that unwinds must not be accessed: the address sanitizer would report it.
TEST(LocalHub, BuffersAreFreeOnceTheHubIsAborted) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    run(3, [repeat](const auto& hub, int rank) {
      auto value = std::make_unique<std::vector<float>>(50000, 1.f);
      const auto ticket = hub->start_all_reduce(LocalHub::kWorld, rank, bytes(*value),
                                                value->size(), DType::kFloat32, ReduceOp::kSum);
      if (rank == repeat % 3) {
        hub->abort("enough");
        value.reset();
        return;
      }
      hub->finish(LocalHub::kWorld, rank, ticket);
    });
  }
}

TEST(LocalHub, ReportsACircleOfWaits) {
  const auto errors = run(3, [](const auto& hub, int rank) {
    std::vector<int> value(1);
    hub->receive(LocalHub::kWorld, rank, (rank + 1) % 3, 8, segment(value));
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error.rfind("deadlock, no rank can go on", 0), 0u);
    EXPECT_NE(error.find("rank 2: receives 4 bytes from rank 0, tag 8"), std::string::npos);
  }
}

TEST(LocalHub, ReportsAWaitForARankThatHasEnded) {
  const auto errors = run(3, [](const auto& hub, int rank) {
    std::vector<int> value(1);
    if (rank == 0) return;
    hub->finish(LocalHub::kWorld, rank,
                hub->start_all_reduce(LocalHub::kWorld, rank, bytes(value), 1, DType::kInt32,
                                      ReduceOp::kSum));
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_NE(errors[1].find("still without rank 0"), std::string::npos);
  EXPECT_NE(errors[2].find("rank 0: has ended"), std::string::npos);
}

TEST(LocalHub, ARankThatComputesIsNoDeadlock) {
  expect_none(run(2, [](const auto& hub, int rank) {
    std::vector<int> value{rank};
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      hub->send(LocalHub::kWorld, 0, 1, 0, segment(value));
    } else {
      hub->receive(LocalHub::kWorld, 1, 0, 0, segment(value));
      EXPECT_EQ(value[0], 0);
    }
  }));
}

}  // namespace
}  // namespace pydist::comm
