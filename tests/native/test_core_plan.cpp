// The exchange planner, on cases whose messages can be listed by hand.
#include <gtest/gtest.h>

#include <vector>

#include "core/plan.hpp"
#include "printing.hpp"

namespace pydist {
namespace {

Box line(index_t lo, index_t hi) { return Box({lo}, {hi}); }

TEST(Plan, HaloOfOneCrossesOneSplit) {
  const ExchangeSpec spec{{line(0, 4), line(4, 8)}, {{line(-1, 5)}, {line(3, 9)}}};
  const Plan plan = plan_exchange(spec, 0);
  EXPECT_EQ(plan.copies, (std::vector<Transfer>{{line(0, 4), 0}}));
  EXPECT_EQ(plan.recvs, (std::vector<Message>{{1, {{line(4, 5), 0}}}}));
  EXPECT_EQ(plan.sends, (std::vector<Message>{{1, {{line(3, 4), 0}}}}));
}

TEST(Plan, WideHaloReachesPastTheNeighbourAndEmptyShards) {
  const ExchangeSpec spec{{line(0, 1), line(1, 1), line(1, 2), line(2, 6)},
                          {{line(0, 4)}, {}, {}, {}}};
  const Plan plan = plan_exchange(spec, 0);
  ASSERT_EQ(plan.recvs.size(), 2u);
  EXPECT_EQ(plan.recvs[0].peer, 2);
  EXPECT_EQ(plan.recvs[1].peer, 3);
  EXPECT_EQ(plan.recvs[1].elements(), 2);
  EXPECT_TRUE(plan_exchange(spec, 1).sends.empty());
}

TEST(Plan, CornersTravelInTheSamePhase) {
  const std::vector<Box> owned{Box({0, 0}, {2, 2}), Box({0, 2}, {2, 4}), Box({2, 0}, {4, 2}),
                               Box({2, 2}, {4, 4})};
  const ExchangeSpec spec{owned, {{Box({-1, -1}, {3, 3})}, {}, {}, {}}};
  const Plan plan = plan_exchange(spec, 0);
  ASSERT_EQ(plan.recvs.size(), 3u);
  EXPECT_EQ(plan.recvs[2].transfers[0].box, Box({2, 2}, {3, 3}));
}

TEST(Plan, ReplicasServeThemselvesAndShareTheRest) {
  const ExchangeSpec spec{{line(0, 2), line(0, 2), line(2, 4), line(4, 4)},
                          {{line(0, 2)}, {line(0, 2)}, {line(0, 2)}, {line(0, 2)}}};
  EXPECT_EQ(plan_exchange(spec, 1).copies.size(), 1u);
  EXPECT_EQ(plan_exchange(spec, 2).recvs[0].peer, 0);  // holders {0, 1}: 2 % 2
  EXPECT_EQ(plan_exchange(spec, 3).recvs[0].peer, 1);
  EXPECT_EQ(plan_exchange(spec, 0).sends.size(), 1u);
  EXPECT_EQ(plan_exchange(spec, 1).sends.size(), 1u);
}

TEST(Plan, RefusesAWrongSpecOnEveryRank) {
  const auto refused = [](const ExchangeSpec& spec) {
    for (int rank = 0; rank < 2; ++rank) EXPECT_THROW(plan_exchange(spec, rank), UsageError);
  };
  refused({{line(0, 3), line(2, 4)}, {{}, {}}});                     // overlap
  refused({{line(0, 3), Box({0, 0}, {1, 1})}, {{}, {}}});            // dims differ
  refused({{line(0, 3), line(3, 4)}, {{}}});                         // ranks differ
  refused({{line(0, 3), line(3, 4)}, {{Box({0, 0}, {1, 1})}, {}}});  // needed dims
  EXPECT_THROW(plan_exchange({{line(0, 3)}, {{}}}, 1), UsageError);  // no such rank
}

}  // namespace
}  // namespace pydist
