// Boundary convolution: the CPU backend and the emulated CUDA tiles against plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "conv_cases.hpp"
#include "launch/emulate.hpp"
#include "ops/conv/cpu_wgrad_rows.hpp"
#include "ops/conv/kernels.hpp"
#include "ops/conv/tile_body.hpp"

namespace pydist {
namespace {

using ops::ConvOp;
using ops::ConvProblem;
using testing::Array;
using testing::ConvCase;
using testing::Random;

template <ConvOp kOp>
Array expected(const ConvCase& given) {
  ConvCase sums = given;  // its target is accumulated; operands are those of `given`
  ConvCase operands = given;
  Array& target = kOp == ConvOp::kForward ? sums.out
                  : kOp == ConvOp::kDgrad ? sums.in
                                          : sums.weight;
  const Array& source = kOp == ConvOp::kForward ? operands.out
                        : kOp == ConvOp::kDgrad ? operands.in
                                                : operands.weight;
  operands.triples([&](double& x, double& w, double& y) {
    const double* const element = kOp == ConvOp::kForward ? &y : kOp == ConvOp::kDgrad ? &x : &w;
    const double product = kOp == ConvOp::kForward ? w * x : kOp == ConvOp::kDgrad ? w * y : x * y;
    const auto place = static_cast<std::size_t>(element - source.memory.data());
    target.memory[place] += product;
  });
  return target;
}

template <ConvOp kOp>
const Array& target_of(const ConvCase& test) {
  if constexpr (kOp == ConvOp::kForward) return test.out;
  if constexpr (kOp == ConvOp::kDgrad) return test.in;
  if constexpr (kOp == ConvOp::kWgrad) return test.weight;
}

// Values are multiples of 1/8, and sums are short, so that they are exact in fp64 in any order.
template <ConvOp kOp>
void check_case(const ConvCase& given, unsigned seed) {
  const Array wanted = expected<kOp>(given);
  ConvCase on_cpu = given;
  const ConvProblem problem = on_cpu.problem();
  if constexpr (kOp == ConvOp::kForward) cpu::boundary_conv_forward(problem);
  if constexpr (kOp == ConvOp::kDgrad) cpu::boundary_conv_dgrad(problem);
  if constexpr (kOp == ConvOp::kWgrad) cpu::boundary_conv_wgrad(problem);
  ASSERT_EQ(target_of<kOp>(on_cpu).memory, wanted.memory) << "cpu, seed " << seed;
  for (const launch::ThreadOrder order : launch::kThreadOrders) {
    ConvCase emulated = given;
    launch::emulate_tiles(ops::ConvTileBody<kOp, double>::make(emulated.problem()), order);
    ASSERT_EQ(target_of<kOp>(emulated).memory, wanted.memory)
        << "emulated in order " << static_cast<int>(order) << ", seed " << seed;
  }
}

class BoundaryConv : public ::testing::TestWithParam<unsigned> {};

TEST_P(BoundaryConv, ForwardIsTheDefinition) {
  check_case<ConvOp::kForward>(ConvCase::make(GetParam()), GetParam());
}
TEST_P(BoundaryConv, DgradIsTheDefinition) {
  check_case<ConvOp::kDgrad>(ConvCase::make(GetParam()), GetParam());
}
TEST_P(BoundaryConv, WgradIsTheDefinition) {
  check_case<ConvOp::kWgrad>(ConvCase::make(GetParam()), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Random, BoundaryConv, ::testing::Range(0u, 24u));

// One thin slab beside a larger output, as in training: several tiles, vectors and chunks.
ConvCase large_case() {
  Random random(1);
  return {Array(random, {1, 9, 1, 24, 30}),
          Array(random, {10, 9, 3, 3, 3}),
          Array(random, {1, 10, 2, 24, 30}),
          {{-1, 0, 0}, {0, 0, 0}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}};
}

TEST(BoundaryConvOnCpu, LargePlanesAreTheDefinition) {
  const ConvCase given = large_case();
  ConvCase forward = given, dgrad = given, wgrad = given;
  cpu::boundary_conv_forward(forward.problem());
  cpu::boundary_conv_dgrad(dgrad.problem());
  cpu::boundary_conv_wgrad(wgrad.problem());
  EXPECT_EQ(forward.out.memory, expected<ConvOp::kForward>(given).memory);
  EXPECT_EQ(dgrad.in.memory, expected<ConvOp::kDgrad>(given).memory);
  EXPECT_EQ(wgrad.weight.memory, expected<ConvOp::kWgrad>(given).memory);
}

Array channels_last(Random& random, const Coords& shape) {
  Array array(random, shape);
  const index_t channels = shape[1], width = channels * shape[4], height = width * shape[3];
  array.view.strides = {height * shape[2], 1, height, width, channels};
  return array;
}

// Rows long enough for several pieces, channels of several vectors in every instruction set.
ConvCase rows_case(unsigned seed) {
  Random random(seed);
  Coords kernel(3), in(3), out(3), in_lo(3), out_lo(3), stride(3), padding(3), dilation(3);
  for (int dim = 0; dim < 3; ++dim) {
    kernel[dim] = random.between(1, 4);
    stride[dim] = random.between(1, 2);
    padding[dim] = random.between(0, 2);
    dilation[dim] = random.between(1, 2);
    in_lo[dim] = random.between(-2, 2);
    out_lo[dim] = random.between(-1, 1);
    in[dim] = dim < 2 ? random.between(1, 4) : random.between(8, 20);
    out[dim] = dim < 2 ? random.between(1, 4) : random.between(8, 20);
  }
  const index_t batch = random.between(1, 2);
  const index_t ci = random.between(1, 11), co = 8 * random.between(1, 3);
  return {channels_last(random, {batch, ci, in[0], in[1], in[2]}),
          Array(random, {co, ci, kernel[0], kernel[1], kernel[2]}),
          channels_last(random, {batch, co, out[0], out[1], out[2]}),
          {in_lo, out_lo, stride, padding, dilation, 1}};
}

TEST(WgradRows, AreTheDefinition) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    const ConvCase given = rows_case(seed);
    ConvCase added = given;
    ASSERT_TRUE(cpu::add_wgrad_by_rows(added.problem())) << "seed " << seed;
    ASSERT_EQ(added.weight.memory, expected<ConvOp::kWgrad>(given).memory) << "seed " << seed;
  }
}

// More planes than tasks, and rows longer than the maximum of one sum.
TEST(WgradRows, OfLargeArraysAreTheDefinition) {
  Random random(3);
  ConvCase given{channels_last(random, {1, 1, 37, 2, 600}),
                 Array(random, {8, 1, 3, 3, 3}),
                 channels_last(random, {1, 8, 37, 2, 600}),
                 {{0, 0, 0}, {0, 0, 0}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}};
  const Array wanted = expected<ConvOp::kWgrad>(given);
  ASSERT_TRUE(cpu::add_wgrad_by_rows(given.problem()));
  EXPECT_EQ(given.weight.memory, wanted.memory);
}

TEST(WgradRows, LeaveWhatLiesOtherwiseAlone) {
  ConvCase given = rows_case(0);
  given.in.view.strides = Random(1).strides_for(given.in.view.shape);
  given.in.view.strides[1] = 2;
  const std::vector<double> before = given.weight.memory;
  EXPECT_FALSE(cpu::add_wgrad_by_rows(given.problem()));
  EXPECT_EQ(given.weight.memory, before);
}

TEST(ConvTile, HasNothingToDoWhereTheSlabReachesNothing) {
  Random random(2);
  const ConvCase far{Array(random, {1, 2, 1, 4, 4}),
                     Array(random, {2, 2, 3, 3, 3}),
                     Array(random, {1, 2, 4, 4, 4}),
                     {{50, 0, 0}, {0, 0, 0}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}};
  using Forward = ops::ConvTileBody<ConvOp::kForward, double>;
  using Wgrad = ops::ConvTileBody<ConvOp::kWgrad, double>;
  EXPECT_EQ(Forward::make(far.problem()).blocks(), 0);
  EXPECT_EQ(Wgrad::make(far.problem()).blocks(), 0);
}

}  // namespace
}  // namespace pydist
