// Boxes, partitions and footprints.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "core/box.hpp"
#include "core/footprint.hpp"
#include "core/partition.hpp"
#include "core/view.hpp"
#include "printing.hpp"

namespace pydist {
namespace {

constexpr index_t kHuge = index_t{1} << 40;

TEST(Arithmetic, RefusesOverflow) {
  constexpr index_t max = std::numeric_limits<index_t>::max();
  EXPECT_EQ(checked_add(max, 0), max);
  EXPECT_THROW(checked_add(max, 1), UsageError);
  EXPECT_THROW(checked_sub(-max, 2), UsageError);
  EXPECT_THROW(checked_mul(kHuge, kHuge), UsageError);
}

TEST(Arithmetic, DivisionRoundsTowardsInfinity) {
  for (index_t a = -7; a <= 7; ++a) {
    for (index_t b = 1; b <= 4; ++b) {
      EXPECT_LE(floor_div(a, b) * b, a);
      EXPECT_GT((floor_div(a, b) + 1) * b, a);
      EXPECT_GE(ceil_div(a, b) * b, a);
      EXPECT_LT((ceil_div(a, b) - 1) * b, a);
    }
  }
}

TEST(Coords, HoldAtMostEightDims) {
  EXPECT_EQ(Coords(8).ndim(), 8);
  EXPECT_THROW(Coords(9), UsageError);
  EXPECT_LT((Coords{1, 2}), (Coords{1, 3}));
  EXPECT_NE((Coords{1}), (Coords{1, 0}));
}

TEST(Coords, OverrunIsCaughtWhereBoundsAreChecked) {
  if (!PYDIST_CHECK_BOUNDS) GTEST_SKIP() << "built without PYDIST_CHECK_BOUNDS";
  const Coords coords{1, 2};
  EXPECT_THROW(coords[2], InternalError);
  EXPECT_THROW(coords[-1], InternalError);
}

TEST(Coords, VolumeIsZeroBeforeItOverflows) {
  EXPECT_EQ(volume_of(Coords{kHuge, 0, kHuge}), 0);
  EXPECT_THROW(volume_of(Coords{kHuge, 1, kHuge}), UsageError);
  EXPECT_EQ(volume_of(Coords(0)), 1);
}

TEST(Box, IntersectsToAnEmptyBoxWhereDisjoint) {
  const Box a({0, 0}, {4, 4});
  const Box b({2, 5}, {6, 7});
  EXPECT_TRUE(a.intersect(b).empty());
  EXPECT_FALSE(a.overlaps(b));
  EXPECT_EQ(a.intersect(Box({-1, 2}, {2, 9})), Box({0, 2}, {2, 4}));
}

TEST(Box, RefusesWhatIsNoBox) {
  EXPECT_THROW(Box({1}, {0}), UsageError);
  EXPECT_THROW(Box({0}, {1, 1}), UsageError);
  EXPECT_THROW(Box(Coords(0), Coords(0)), UsageError);
  EXPECT_THROW(Box({0, 0}, {kHuge, kHuge}), UsageError);
  EXPECT_THROW(Box({0}, {1}).intersect(Box({0, 0}, {1, 1})), UsageError);
  EXPECT_THROW(Box({0}, {1}).shift({std::numeric_limits<index_t>::max()}), UsageError);
}

TEST(Box, ContainsEveryEmptyBox) {
  EXPECT_TRUE(Box({0}, {4}).contains(Box({9}, {9})));
  EXPECT_TRUE(Box({0}, {4}).contains(Box({1}, {4})));
  EXPECT_FALSE(Box({0}, {4}).contains(Box({1}, {5})));
}

// Outer and inner boxes that are disjoint, overlap, or cover each other in each dim.
class Subtract : public testing::TestWithParam<Box> {};

TEST_P(Subtract, CoversTheRestDisjointly) {
  const Box outer({0, 0, 0}, {4, 5, 3});
  const Box& inner = GetParam();
  const std::vector<Box> slabs = subtract(outer, inner);
  EXPECT_LE(slabs.size(), 6u);
  index_t volume = outer.intersect(inner).volume();
  for (std::size_t i = 0; i < slabs.size(); ++i) {
    EXPECT_TRUE(outer.contains(slabs[i]));
    EXPECT_FALSE(slabs[i].empty());
    EXPECT_FALSE(slabs[i].overlaps(inner));
    for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(slabs[i].overlaps(slabs[j]));
    volume += slabs[i].volume();
  }
  EXPECT_EQ(volume, outer.volume());
}

INSTANTIATE_TEST_SUITE_P(Inner, Subtract,
                         testing::Values(Box({1, 1, 1}, {3, 4, 2}), Box({0, 0, 0}, {4, 5, 3}),
                                         Box({-2, 2, -1}, {9, 3, 9}), Box({7, 7, 7}, {8, 8, 8}),
                                         Box({0, 0, 0}, {0, 5, 3}), Box({3, 4, 2}, {6, 6, 6})));

TEST(Partition, EvenGivesTheFirstPartsMore) {
  EXPECT_EQ(Partition::even(10, 4).points(), (std::vector<index_t>{0, 3, 6, 8, 10}));
  EXPECT_EQ(Partition::even(2, 4).points(), (std::vector<index_t>{0, 1, 2, 2, 2}));
}

TEST(Partition, OwnerSkipsEmptyParts) {
  const Partition partition({0, 0, 3, 3, 5, 5});
  EXPECT_EQ(partition.owner(0), 1);
  EXPECT_EQ(partition.owner(3), 3);
  EXPECT_EQ(partition.owner(4), 3);
  EXPECT_THROW(partition.owner(5), UsageError);
  EXPECT_THROW(partition.owner(-1), UsageError);
}

TEST(Partition, RefusesWrongPoints) {
  EXPECT_THROW(Partition({1, 2}), UsageError);
  EXPECT_THROW(Partition({0}), UsageError);
  EXPECT_THROW(Partition({0, 3, 2}), UsageError);
  EXPECT_THROW(Partition::even(4, 0), UsageError);
  EXPECT_THROW(Partition::even(-1, 2), UsageError);
}

TEST(Footprint, OutputExtentIsTorchs) {
  EXPECT_EQ(Footprint(3, 1, 1, 1, 1).output_extent(8), 8);
  EXPECT_EQ(Footprint(3, 2, 1, 1, 1).output_extent(8), 4);
  EXPECT_EQ(Footprint(2, 2, 3, 0, 1).output_extent(8), 3);
  EXPECT_EQ(Footprint(5).output_extent(4), 0);
  EXPECT_THROW(Footprint(3).output_extent(-1), UsageError);
  EXPECT_THROW(Footprint(0), UsageError);
  EXPECT_THROW(Footprint(kHuge, 1, kHuge), UsageError);
}

TEST(Footprint, EmptyIntervalsStayEmpty) {
  const Footprint footprint(3, 2, 1, 1, 1);
  const auto [lo, hi] = footprint.needs(4, 4);
  EXPECT_EQ(lo, hi);
  const auto [first, last] = footprint.feeds(4, 4);
  EXPECT_EQ(first, last);
  // Stride larger than the kernel: no output reads input 1.
  const auto [from, to] = Footprint(1, 2).feeds(1, 2);
  EXPECT_EQ(from, to);
}

TEST(TensorView, KnowsWhetherItIsContiguous) {
  TensorView view{nullptr, DType::kFloat32, {2, 3}, {3, 1}, {}};
  EXPECT_TRUE(view.contiguous());
  EXPECT_EQ(view.bytes(), 24);
  view.strides = {1, 2};
  EXPECT_FALSE(view.contiguous());
  view.shape = {1, 3};
  view.strides = {77, 1};
  EXPECT_TRUE(view.contiguous());
  view.shape = {0, 3};
  EXPECT_EQ(view.elements(), 0);
}

}  // namespace
}  // namespace pydist
