// Sums over pooling windows: the CPU backend and the emulated CUDA threads against plain loops.
#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "launch/emulate.hpp"
#include "ops/pool/kernels.hpp"
#include "pool_arrays.hpp"

namespace pydist {
namespace {

using ops::PoolAttributes;
using ops::PoolOp;
using ops::PoolProblem;
using testing::Array;
using testing::for_each_index;
using testing::Random;
using testing::Storing;

template <class Storage>
struct PoolCase {
  Array<Storage> in, out;
  PoolAttributes attributes;
  std::vector<double> scales[3];
  bool accumulate;
  double slope;         // of a ReLU before the pooling
  Array<Storage> gate;  // like `in`

  PoolProblem problem() const {
    PoolProblem problem =
        ops::pool_problem(in.view, out.view, attributes,
                          {scales[0].data(), scales[1].data(), scales[2].data()}, accumulate);
    problem.slope = slope;
    if (slope != 1) problem.gate = gate.view.data;
    return problem;
  }

  static PoolCase from(const PoolCase<double>& other) {
    return {Array<Storage>(other.in),  Array<Storage>(other.out),
            other.attributes,          {other.scales[0], other.scales[1], other.scales[2]},
            other.accumulate,          other.slope,
            Array<Storage>(other.gate)};
  }

  static PoolCase make(unsigned seed) {
    Random random(seed);
    Coords in{2, 1, 0, 0, 0}, out{2, 1, 0, 0, 0}, in_lo(3), out_lo(3);
    std::vector<Footprint> footprints;
    const bool adaptive = random.chance(0.2);
    Storing storing(random);
    in[1] = out[1] = storing.channels();
    std::vector<double> scales[3];
    for (int dim = 0; dim < 3; ++dim) {
      const bool wide = dim == 2 && random.chance(0.5);
      in[2 + dim] = wide ? 37 : random.between(0, 7);
      out[2 + dim] = wide ? 35 : random.between(0, 7);
      if (adaptive) {
        in_lo[dim] = random.between(0, 3);
        out_lo[dim] = random.between(0, 3);
        footprints.push_back(
            Footprint::adaptive(in_lo[dim] + in[2 + dim] + random.between(1, 3),
                                out_lo[dim] + out[2 + dim] + random.between(1, 3)));
      } else {
        const index_t stride = random.between(1, 3), padding = random.between(0, 2);
        footprints.emplace_back(random.between(1, 5), stride, 1, padding, padding);
        in_lo[dim] = random.between(-4, 6);
        out_lo[dim] = in_lo[dim] / stride + random.between(-1, 2);
      }
      for (index_t o = 0; o < out[2 + dim]; ++o) {
        scales[dim].push_back(dim == 2 && seed % 2 == 0 ? 1 : random.chance(0.5) ? 0.5 : 2);
      }
    }
    const auto in_array = storing.array<Storage>(in), out_array = storing.array<Storage>(out);
    const double slopes[] = {1, 0, 0.125};
    return {in_array,
            out_array,
            {in_lo, out_lo, footprints},
            {scales[0], scales[1], scales[2]},
            random.chance(0.5),
            slopes[random.between(0, 2)],
            Array<Storage>(random, in, in_array.view.strides, in_array.begin)};
  }
};

template <PoolOp kOp, class Storage>
Array<Storage>& target_of(PoolCase<Storage>& test) {
  return kOp == PoolOp::kForward ? test.out : test.in;
}

template <PoolOp kOp>
PoolCase<double> expected(const PoolCase<double>& given) {
  PoolCase<double> sums = given, operands = given;
  const auto& [in_lo, out_lo, footprints] = given.attributes;
  if (!given.accumulate) target_of<kOp>(sums).fill(0);
  for_each_index(Box(Coords(5), given.out.view.shape), [&](const Coords& o) {
    const double scale = given.scales[0][static_cast<std::size_t>(o[2])] *
                         given.scales[1][static_cast<std::size_t>(o[3])] *
                         given.scales[2][static_cast<std::size_t>(o[4])];
    Coords first(3), end(3);
    for (int dim = 0; dim < 3; ++dim) {
      const Footprint& footprint = footprints[static_cast<std::size_t>(dim)];
      std::tie(first[dim], end[dim]) =
          footprint.needs(out_lo[dim] + o[2 + dim], out_lo[dim] + o[2 + dim] + 1);
    }
    for_each_index(Box(first, end), [&](const Coords& position) {
      Coords i = o;
      for (int dim = 0; dim < 3; ++dim) {
        i[2 + dim] = position[dim] - in_lo[dim];
        if (i[2 + dim] < 0 || i[2 + dim] >= given.in.view.shape[2 + dim]) return;
      }
      if constexpr (kOp == PoolOp::kForward) {
        const double value = operands.in.at(i);
        sums.out.at(o) += scale * value * (value > 0 ? 1 : given.slope);
      } else {
        sums.in.at(i) += scale * operands.out.at(o) * (operands.gate.at(i) > 0 ? 1 : given.slope);
      }
    });
  });
  return sums;
}

// Values are multiples of 1/8, scales powers of two: sums are exact in any order, and rounded once.
template <PoolOp kOp, class Storage>
void check_case(unsigned seed) {
  const auto exact = PoolCase<double>::make(seed);
  using Case = PoolCase<Storage>;
  const Case given = Case::from(exact);
  Case wanted = Case::from(expected<kOp>(exact));
  const std::vector<double> numbers = target_of<kOp>(wanted).numbers();
  Case on_cpu = given;
  (kOp == PoolOp::kForward ? cpu::pool_sum_forward : cpu::pool_sum_backward)(on_cpu.problem());
  ASSERT_EQ(target_of<kOp>(on_cpu).numbers(), numbers) << "cpu, seed " << seed;
  for (const launch::ThreadOrder order : launch::kThreadOrders) {
    Case emulated = given;
    ops::dispatch_activation(given.slope, [&](auto activation) {
      ops::with_pool_body<kOp, Storage, activation()>(emulated.problem(), [&](const auto& body) {
        if (body.rows() > 0) {
          launch::emulate_runs(body, launch::run_grid(body.rows(), body.run_length()), order);
        }
      });
    });
    ASSERT_EQ(target_of<kOp>(emulated).numbers(), numbers)
        << "emulated in order " << static_cast<int>(order) << ", seed " << seed;
  }
}

template <PoolOp kOp>
void check_types(unsigned seed) {
  check_case<kOp, double>(seed);
  check_case<kOp, float>(seed);
  check_case<kOp, ops::Float16>(seed);
  check_case<kOp, ops::BFloat16>(seed);
}

class PoolSum : public ::testing::TestWithParam<unsigned> {};

TEST_P(PoolSum, ForwardIsTheDefinition) { check_types<PoolOp::kForward>(GetParam()); }
TEST_P(PoolSum, BackwardIsTheDefinition) { check_types<PoolOp::kBackward>(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Random, PoolSum, ::testing::Range(0u, 60u));

// How many of the random cases use vectors.
TEST(PoolBody, IsReachedWithAndWithoutVectors) {
  int wide = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    auto test = PoolCase<ops::BFloat16>::from(PoolCase<double>::make(seed));
    wide += test.problem().has_vectors(8, 2);
  }
  EXPECT_GE(wide, 10);
  EXPECT_LE(wide, 50);
}

TEST(PoolBody, HasNothingToAddWhereTheSourceReachesNothing) {
  auto far = PoolCase<double>::make(3);
  far.attributes.in_lo = {1000, 0, 0};
  far.attributes.footprints.assign(3, Footprint(3, 2, 1, 1, 1));
  far.accumulate = true;
  using Forward = ops::PoolBody<PoolOp::kForward, double, 1>;
  using Backward = ops::PoolBody<PoolOp::kBackward, double, 1>;
  EXPECT_EQ(Forward::make(far.problem()).rows(), 0);
  EXPECT_EQ(Backward::make(far.problem()).rows(), 0);
}

// Arrays of 512^3 x 32 elements: beyond the indices that 32 bits hold. No memory is needed.
TEST(PoolLanes, TheLastPieceIsTheLastElementOfALargeArray) {
  constexpr index_t kWidth = 512, kArea = kWidth * kWidth, kVolume = kArea * kWidth, kChannels = 32;
  constexpr index_t kAll = kChannels * kVolume;
  const ops::Span targets[] = {{0, kWidth}, {0, kWidth}, {0, kWidth}};
  const ops::SpatialArray arrays[] = {
      {nullptr, {kAll, kVolume, kArea, kWidth, 1}},
      {nullptr, {kAll, 1, kArea * kChannels, kWidth * kChannels, kChannels}}};
  for (const ops::SpatialArray& array : arrays) {
    const int elements = array.strides[1] == 1 ? 8 : 1;
    const auto lanes = ops::PoolLanes::make(1, kChannels, targets, array, elements);
    const auto row = lanes.position(lanes.row_count - 1);
    const auto piece = lanes.piece(lanes.run_length() - 1);
    const index_t first =
        row.sample * array.strides[0] + (row.channel + piece.channel) * array.strides[1] +
        row.z * array.strides[2] + row.y * array.strides[3] + piece.x * array.strides[4];
    EXPECT_EQ(first + elements, kAll);
  }
}

TEST(PoolLanes, RefusesMoreRowsThanADeviceCounts) {
  const ops::Span targets[] = {{0, 1}, {0, 1}, {0, 1}};
  const ops::SpatialArray array{nullptr, {1 << 12, 1, 1, 1, 1}};
  const ops::SpatialArray apart{nullptr, {1 << 13, 2, 1, 1, 1}};
  EXPECT_EQ(ops::PoolLanes::make(1 << 20, 1 << 12, targets, array, 1).row_count, 1 << 20);
  EXPECT_THROW(ops::PoolLanes::make(1 << 20, 1 << 12, targets, apart, 1), UsageError);
}

TEST(PoolProblem, RefusesIndicesThatOverflow) {
  auto test = PoolCase<double>::make(4);
  test.attributes.out_lo = {index_t{1} << 62, 0, 0};
  test.attributes.footprints.assign(3, Footprint(3, 4, 1, 1, 1));
  EXPECT_THROW(test.problem(), UsageError);
}

}  // namespace
}  // namespace pydist
