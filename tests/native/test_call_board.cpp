// Boards of calls, with threads as ranks (also under the thread sanitizer).
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "comm/board/call_board.hpp"

namespace pydist::comm {
namespace {

// Two ranks that read each other.
struct Pair {
  std::unique_ptr<CallPage> pages[2] = {std::make_unique<CallPage>(), std::make_unique<CallPage>()};
  CallBoard boards[2];

  void share() {
    for (int rank : {0, 1}) boards[rank].share(*pages[rank], {{1 - rank, pages[1 - rank].get()}});
  }
};

TEST(CallBoard, TheSecondThatCallsSomethingElseNamesTheFirst) {
  Pair pair;
  pair.share();
  auto& [first, second] = pair.boards;
  EXPECT_EQ(first.enter(11, "one"), -1);
  EXPECT_EQ(first.enter(12, "two"), -1);
  EXPECT_EQ(second.enter(11, "one"), -1);
  EXPECT_EQ(second.enter(13, "three"), 0);
  EXPECT_NE(first.state(), second.state());
  const auto theirs = second.call_of(0, 2);
  ASSERT_TRUE(theirs);
  EXPECT_EQ(theirs->text, "two");
  EXPECT_EQ(theirs->digest, 12);
  EXPECT_EQ(theirs->state, first.state());
  EXPECT_FALSE(second.call_of(0, 3));
}

TEST(CallBoard, TheOrderOfCallsCounts) {
  CallBoard first, second;
  for (std::int64_t digest : {1, 2}) first.enter(digest, "");
  for (std::int64_t digest : {2, 1}) second.enter(digest, "");
  EXPECT_NE(first.state(), second.state());
  EXPECT_EQ(first.stamp()[0], second.stamp()[0]);
  EXPECT_EQ(first.stamp()[2], 1);
  EXPECT_EQ(first.stamp()[3], 2);
}

TEST(CallBoard, WhatWasEnteredBeforeIsSharedAndOldCallsAreForgotten) {
  Pair pair;
  auto& [first, second] = pair.boards;
  first.enter(5, "early");
  pair.share();
  EXPECT_EQ(second.enter(6, "other"), 0);
  const std::string text(1000, 'x');
  for (std::int64_t call = 0; call <= CallPage::kCalls; ++call) first.enter(call, text);
  EXPECT_EQ(static_cast<std::int64_t>(first.recent().size()), CallPage::kCalls);
  EXPECT_EQ(first.recent().front().number, 3);
  EXPECT_EQ(first.recent().back().text, text.substr(0, 304));
  EXPECT_EQ(second.enter(7, "many calls later"), -1);
}

TEST(CallBoard, RanksThatCallTheSameAtTheirOwnPaceSeeNoDifference) {
  Pair pair;
  pair.share();
  std::atomic<int> differences{0};
  const auto run = [&](int rank) {
    for (std::int64_t call = 0; call < 20'000; ++call) {
      if (pair.boards[rank].enter(call * call, "call") != -1) ++differences;
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  EXPECT_EQ(differences, 0);
}

TEST(CallBoard, OneOfTwoThatCallDifferentThingsAtTheSameTimeNotices) {
  for (int round = 0; round < 300; ++round) {
    Pair pair;
    pair.share();
    int seen = -1;
    std::thread other([&] { seen = pair.boards[1].enter(2, "two"); });
    const int mine = pair.boards[0].enter(1, "one");
    other.join();
    EXPECT_TRUE(mine == 1 || seen == 0);
  }
}

}  // namespace
}  // namespace pydist::comm
