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
using testing::for_each_index;
using testing::Random;
using testing::some_strides;
using Array = testing::Array<double>;

struct PoolCase {
  Array in, out;
  PoolAttributes attributes;
  std::vector<double> scales[3];
  bool accumulate;
  double slope;  // of a ReLU before the pooling
  Array gate;    // like `in`

  PoolProblem problem() const {
    PoolProblem problem =
        ops::pool_problem(in.view, out.view, attributes,
                          {scales[0].data(), scales[1].data(), scales[2].data()}, accumulate);
    problem.slope = slope;
    if (slope != 1) problem.gate = gate.memory.data();
    return problem;
  }

  static PoolCase make(unsigned seed) {
    Random random(seed);
    Coords in{2, 1, 0, 0, 0}, out{2, 1, 0, 0, 0}, in_lo(3), out_lo(3);
    std::vector<Footprint> footprints;
    const bool adaptive = random.chance(0.2);
    in[1] = out[1] = random.chance(0.3) ? 1 : random.between(2, 21);
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
    Array in_array(random, in, some_strides(random, in));
    Array out_array(random, out, some_strides(random, out));
    const double slopes[] = {1, 0, 0.125};
    return {in_array,
            out_array,
            {in_lo, out_lo, footprints},
            {scales[0], scales[1], scales[2]},
            random.chance(0.5),
            slopes[random.between(0, 2)],
            Array(random, in, in_array.view.strides)};
  }
};

template <PoolOp kOp>
Array& target_of(PoolCase& test) {
  return kOp == PoolOp::kForward ? test.out : test.in;
}

template <PoolOp kOp>
std::vector<double> expected(const PoolCase& given) {
  PoolCase sums = given, operands = given;
  const auto& [in_lo, out_lo, footprints] = given.attributes;
  std::vector<double>& target = target_of<kOp>(sums).memory;
  if (!given.accumulate) target.assign(target.size(), 0);
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
  return target;
}

// Values are multiples of 1/8, scales powers of two: sums are exact in any order.
template <PoolOp kOp>
void check_case(unsigned seed) {
  const PoolCase given = PoolCase::make(seed);
  const std::vector<double> wanted = expected<kOp>(given);
  PoolCase on_cpu = given;
  (kOp == PoolOp::kForward ? cpu::pool_sum_forward : cpu::pool_sum_backward)(on_cpu.problem());
  ASSERT_EQ(target_of<kOp>(on_cpu).memory, wanted) << "cpu, seed " << seed;
  for (const launch::ThreadOrder order : launch::kThreadOrders) {
    PoolCase emulated = given;
    ops::dispatch_rectifier(given.slope, [&](auto activation) {
      const auto body = ops::PoolBody<kOp, double, activation()>::make(emulated.problem());
      if (body.rows() > 0) {
        launch::emulate_runs(body, launch::run_grid(body.rows(), body.run_length()), order);
      }
    });
    ASSERT_EQ(target_of<kOp>(emulated).memory, wanted)
        << "emulated in order " << static_cast<int>(order) << ", seed " << seed;
  }
}

class PoolSum : public ::testing::TestWithParam<unsigned> {};

TEST_P(PoolSum, ForwardIsTheDefinition) { check_case<PoolOp::kForward>(GetParam()); }
TEST_P(PoolSum, BackwardIsTheDefinition) { check_case<PoolOp::kBackward>(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Random, PoolSum, ::testing::Range(0u, 60u));

TEST(PoolBody, HasNothingToAddWhereTheSourceReachesNothing) {
  PoolCase far = PoolCase::make(3);
  far.attributes.in_lo = {1000, 0, 0};
  far.attributes.footprints.assign(3, Footprint(3, 2, 1, 1, 1));
  far.accumulate = true;
  using Forward = ops::PoolBody<PoolOp::kForward, double>;
  using Backward = ops::PoolBody<PoolOp::kBackward, double>;
  EXPECT_EQ(Forward::make(far.problem()).rows(), 0);
  EXPECT_EQ(Backward::make(far.problem()).rows(), 0);
}

TEST(PoolProblem, RefusesIndicesThatOverflow) {
  PoolCase test = PoolCase::make(4);
  test.attributes.out_lo = {index_t{1} << 62, 0, 0};
  test.attributes.footprints.assign(3, Footprint(3, 4, 1, 1, 1));
  EXPECT_THROW(test.problem(), UsageError);
}

}  // namespace
}  // namespace pydist
