// Boundary convolution on emulated tensor cores, compared with the CPU backend in fp64 (which
// test_conv.cpp compares with plain loops).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "conv_cases.hpp"
#include "core/errors.hpp"
#include "launch/emulate.hpp"
#include "ops/conv/kernels.hpp"
#include "ops/conv/mma_body.hpp"
#include "ops/conv/partial_body.hpp"

namespace pydist {
namespace {

using ops::BFloat16;
using ops::ConvMath;
using ops::ConvOp;
using ops::ConvProblem;
using ops::Float16;
using testing::Array;
using testing::ConvCase;
using testing::Random;

template <class Storage>
constexpr DType kDtype = std::is_same_v<Storage, float>     ? DType::kFloat32
                         : std::is_same_v<Storage, Float16> ? DType::kFloat16
                                                            : DType::kBFloat16;

// The same array in another type, in memory of its exact size.
template <class Storage>
struct Narrow {
  std::vector<Storage> memory;
  TensorView view;

  explicit Narrow(const Array& array) : view(array.view) {
    for (const double value : array.memory) {
      memory.push_back(ops::store_as<Storage>(static_cast<float>(value)));
    }
    view.data = memory.data();
    view.dtype = kDtype<Storage>;
  }
  std::vector<double> values() const {
    std::vector<double> found;
    for (const Storage& value : memory) found.push_back(ops::load_as(value));
    return found;
  }
  Array widened(const Array& like) const {
    Array wide = like;
    wide.memory = values();
    wide.view.data = wide.memory.data();
    return wide;
  }
};

template <ConvOp kOp>
const auto& target_of(const auto& in, const auto& weight, const auto& out) {
  if constexpr (kOp == ConvOp::kForward) return out;
  if constexpr (kOp == ConvOp::kDgrad) return in;
  if constexpr (kOp == ConvOp::kWgrad) return weight;
}

template <ConvOp kOp>
std::vector<double> by_cpu(const ConvCase& given) {
  ConvCase sums = given;
  const ConvProblem problem = sums.problem();
  if constexpr (kOp == ConvOp::kForward) cpu::boundary_conv_forward(problem);
  if constexpr (kOp == ConvOp::kDgrad) cpu::boundary_conv_dgrad(problem);
  if constexpr (kOp == ConvOp::kWgrad) cpu::boundary_conv_wgrad(problem);
  return target_of<kOp>(sums.in, sums.weight, sums.out).memory;
}

template <ConvOp kOp, class Storage, ConvMath kMath, int kColumns>
std::vector<double> emulated(const ConvCase& given, launch::ThreadOrder order, bool alone = false) {
  using Body = ops::ConvMmaBody<kOp, Storage, kMath, kColumns>;
  const Narrow<Storage> in(given.in), weight(given.weight), out(given.out);
  const ConvProblem problem = ops::conv_problem(in.view, weight.view, out.view, given.attributes);
  EXPECT_EQ(Body::refusal(problem), "");
  std::vector<float> partial(
      static_cast<std::size_t>(Body::make(problem, nullptr).partial_elements()), NAN);
  const Body body = Body::make(problem, partial.data());
  launch::emulate_warp_tiles(alone ? body.alone() : body, order);
  const ops::ConvPartialBody<Body> rest{body};
  if (rest.rows() > 0) {
    launch::emulate_runs(rest, launch::run_grid(rest.rows(), body.n_extent), order);
  }
  return target_of<kOp>(in, weight, out).values();
}

template <class Storage>
std::vector<double> rounded(std::vector<double> values) {
  for (double& value : values) {
    value = ops::load_as(ops::store_as<Storage>(static_cast<float>(value)));
  }
  return values;
}

// Values are multiples of 1/8, and sums are short: products and sums are exact in every format, and
// only stored results are rounded, once.
template <ConvOp kOp, class Storage, ConvMath kMath, int kColumns>
void check_exact(const ConvCase& given, const std::string& where) {
  const std::vector<double> wanted = rounded<Storage>(by_cpu<kOp>(given));
  for (const launch::ThreadOrder order : launch::kThreadOrders) {
    ASSERT_EQ((emulated<kOp, Storage, kMath, kColumns>(given, order)), wanted)
        << where << ", order " << static_cast<int>(order);
  }
}

template <ConvOp kOp>
void check_formats(const ConvCase& given, unsigned seed) {
  const std::string where = "seed " + std::to_string(seed);
  switch (seed % 4) {
    case 0:
      return check_exact<kOp, BFloat16, ConvMath::kTf32, 32>(given, where);
    case 1:
      return check_exact<kOp, Float16, ConvMath::kTf32, 64>(given, where);
    case 2:
      return check_exact<kOp, float, ConvMath::kTf32, 32>(given, where);
    default:
      return check_exact<kOp, float, ConvMath::kTf32x3, 64>(given, where);
  }
}

Coords strides_in_order(const Coords& shape, const Coords& order) {
  Coords strides(shape.ndim());
  index_t stride = 1;
  for (int i = shape.ndim() - 1; i >= 0; --i) {
    strides[static_cast<int>(order[i])] = stride;
    stride *= std::max<index_t>(shape[static_cast<int>(order[i])], 1);
  }
  return strides;
}

// Channels that partly fill reads of 8 or 16 bytes, in the memory formats that torch uses.
ConvCase ragged_case(unsigned seed) {
  Random random(seed + 1000);
  const auto one_of = [&](std::initializer_list<index_t> values) {
    return values.begin()[random.between(0, static_cast<index_t>(values.size()) - 1)];
  };
  ConvCase given = ConvCase::make(seed);
  const index_t groups = one_of({1, 1, 2, 3});
  const index_t ci = one_of({1, 3, 4, 4, 8, 12, 16}), co = one_of({1, 4, 8, 16, 20, 24});
  const Coords x = given.in.view.shape, w = given.weight.view.shape, y = given.out.view.shape;
  const Coords last{0, 2, 3, 4, 1}, plain{0, 1, 2, 3, 4};
  const Coords order = random.chance(0.6) ? last : plain;
  const auto array = [&](const Coords& shape, const Coords& memory) {
    Array made(random, shape);
    made.view.strides = strides_in_order(shape, memory);
    return made;
  };
  given.attributes.groups = groups;
  return {array({x[0], groups * ci, x[2], x[3], x[4]}, order),
          array({groups * co, ci, w[2], w[3], w[4]}, random.chance(0.5) ? last : plain),
          array({x[0], groups * co, y[2], y[3], y[4]}, order), given.attributes};
}

class ConvMma : public ::testing::TestWithParam<unsigned> {};

TEST_P(ConvMma, ForwardIsTheDefinition) {
  check_formats<ConvOp::kForward>(ConvCase::make(GetParam()), GetParam());
  check_formats<ConvOp::kForward>(ragged_case(GetParam()), GetParam());
}
TEST_P(ConvMma, DgradIsTheDefinition) {
  check_formats<ConvOp::kDgrad>(ConvCase::make(GetParam()), GetParam());
  check_formats<ConvOp::kDgrad>(ragged_case(GetParam()), GetParam());
}
TEST_P(ConvMma, WgradIsTheDefinition) {
  check_formats<ConvOp::kWgrad>(ConvCase::make(GetParam()), GetParam());
  check_formats<ConvOp::kWgrad>(ragged_case(GetParam()), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Random, ConvMma, ::testing::Range(0u, 40u));

// A slab beside a plane of outputs.
ConvCase plane_case(bool channels_last, index_t ci, index_t co, const Coords& slab) {
  Random random(1);
  const Coords order = channels_last ? Coords{0, 2, 3, 4, 1} : Coords{0, 1, 2, 3, 4};
  const auto array = [&](const Coords& shape) {
    Array made(random, shape);
    made.view.strides = strides_in_order(shape, order);
    return made;
  };
  return {array({2, ci, 1, slab[1], slab[2]}),
          array({co, ci, 3, 3, 3}),
          array({2, co, 2, slab[1], slab[2]}),
          {{-1, 0, 0}, {0, 0, 0}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}};
}

// Several tiles of rows and columns, several blocks for each sum.
ConvCase large_case(bool channels_last, index_t ci, index_t co) {
  return plane_case(channels_last, ci, co, {1, 20, 21});
}

template <ConvOp kOp, class Storage, ConvMath kMath, int kColumns>
ops::MmaSplits splits_of(const ConvCase& given) {
  const Narrow<Storage> in(given.in), weight(given.weight), out(given.out);
  return ops::ConvMmaBody<kOp, Storage, kMath, kColumns>::make(
             ops::conv_problem(in.view, weight.view, out.view, given.attributes), nullptr)
      .splits;
}

template <ConvOp kOp, class Storage, ConvMath kMath, int kColumns>
void check_order(const ConvCase& given, launch::ThreadOrder order) {
  EXPECT_EQ((emulated<kOp, Storage, kMath, kColumns>(given, order)),
            rounded<Storage>(by_cpu<kOp>(given)));
}

TEST(ConvMmaSums, AreTheDefinitionWhereTheyAreSplit) {
  for (const bool channels_last : {false, true}) {
    const ConvCase given = large_case(channels_last, 64, 40);
    EXPECT_GT((splits_of<ConvOp::kForward, BFloat16, ConvMath::kTf32, 32>(given)).cluster, 1);
    EXPECT_GT((splits_of<ConvOp::kDgrad, float, ConvMath::kTf32, 64>(given)).cluster, 1);
    EXPECT_GT((splits_of<ConvOp::kWgrad, Float16, ConvMath::kTf32, 32>(given)).cluster, 1);
    const auto order =
        channels_last ? launch::ThreadOrder::kReverse : launch::ThreadOrder::kStrided;
    check_order<ConvOp::kForward, BFloat16, ConvMath::kTf32, 32>(given, order);
    check_order<ConvOp::kDgrad, float, ConvMath::kTf32, 64>(given, order);
    check_order<ConvOp::kWgrad, Float16, ConvMath::kTf32, 32>(given, order);
  }
}

// Clusters of every size, whose last block has fewer steps; tiles that end within a quad.
TEST(ConvMmaSums, AreTheDefinitionInClustersOfEverySize) {
  const auto check = [](index_t ci, index_t co, const Coords& slab, int cluster) {
    for (const bool channels_last : {false, true}) {
      const ConvCase given = plane_case(channels_last, ci, co, slab);
      const auto splits = splits_of<ConvOp::kForward, BFloat16, ConvMath::kTf32, 32>(given);
      EXPECT_EQ(splits.cluster, cluster);
      const index_t steps = ceil_div(9 * ci, 32);
      EXPECT_TRUE(cluster == 1 || steps % (splits.cluster * splits.steps) != 0);
      check_order<ConvOp::kForward, BFloat16, ConvMath::kTf32, 32>(given,
                                                                   launch::ThreadOrder::kReverse);
    }
  };
  check(52, 37, {1, 9, 11}, 1);
  check(64, 37, {1, 9, 9}, 4);
  check(124, 70, {1, 7, 9}, 8);
  check(60, 33, {1, 50, 50}, 2);
}

// Every way in which operands are read, by the layout and the number of channels.
TEST(ConvMmaReads, FollowTheLayout) {
  using ops::MmaRead;
  const auto check = [](bool channels_last, index_t ci, index_t co, MmaRead left, MmaRead right) {
    const ConvCase given = plane_case(channels_last, ci, co, {1, 13, 11});
    const Narrow<BFloat16> in(given.in), weight(given.weight), out(given.out);
    const ConvProblem problem = ops::conv_problem(in.view, weight.view, out.view, given.attributes);
    using Forward = ops::ConvMmaBody<ConvOp::kForward, BFloat16, ConvMath::kTf32, 64>;
    using Dgrad = ops::ConvMmaBody<ConvOp::kDgrad, BFloat16, ConvMath::kTf32, 64>;
    using Wgrad = ops::ConvMmaBody<ConvOp::kWgrad, BFloat16, ConvMath::kTf32, 64>;
    const auto forward = Forward::make(problem, nullptr), again = forward.alone();
    EXPECT_EQ(forward.loads.left, left);
    EXPECT_EQ(forward.gather.taps_inside, !channels_last);
    EXPECT_EQ(again.loads.right, left);  // both by input channels
    EXPECT_EQ(Dgrad::make(problem, nullptr).loads.left, right);
    const auto wgrad = Wgrad::make(problem, nullptr);
    EXPECT_EQ(wgrad.loads.finds_once(), left == MmaRead::kVectors && right == MmaRead::kVectors);
    EXPECT_FALSE(wgrad.gather.taps_inside);
    constexpr auto kOrder = launch::ThreadOrder::kStrided;
    check_order<ConvOp::kForward, BFloat16, ConvMath::kTf32, 64>(given, kOrder);
    check_order<ConvOp::kDgrad, BFloat16, ConvMath::kTf32, 64>(given, kOrder);
    check_order<ConvOp::kWgrad, BFloat16, ConvMath::kTf32, 64>(given, kOrder);
    check_order<ConvOp::kForward, float, ConvMath::kTf32, 64>(given, kOrder);
    check_order<ConvOp::kDgrad, float, ConvMath::kTf32x3, 32>(given, kOrder);
    check_order<ConvOp::kWgrad, float, ConvMath::kTf32, 64>(given, kOrder);
  };
  check(true, 16, 72, MmaRead::kVectors, MmaRead::kVectors);
  check(true, 8, 12, MmaRead::kVectors, MmaRead::kHalves);
  check(true, 12, 8, MmaRead::kHalves, MmaRead::kVectors);
  check(true, 6, 7, MmaRead::kElements, MmaRead::kElements);
  check(false, 16, 8, MmaRead::kElements, MmaRead::kElements);
}

// Few channels and many positions: parts of several clusters, the last blocks of which have no
// steps.
TEST(ConvMmaSums, AreTheDefinitionWhereClustersShareATile) {
  for (const bool channels_last : {false, true}) {
    const ConvCase given = plane_case(channels_last, 4, 12, {1, 63, 113});
    const auto splits = splits_of<ConvOp::kWgrad, BFloat16, ConvMath::kTf32, 32>(given);
    EXPECT_GT(splits.cluster, 1);
    EXPECT_GT(splits.parts, 1);
    EXPECT_GE((splits.parts * splits.cluster - 1) * splits.steps, 2 * 63 * 113 / 32 + 1);
    check_order<ConvOp::kWgrad, BFloat16, ConvMath::kTf32, 32>(given,
                                                               launch::ThreadOrder::kReverse);
    check_order<ConvOp::kWgrad, float, ConvMath::kTf32x3, 64>(given, launch::ThreadOrder::kForward);
  }
}

// Without clusters a block does the steps of one, and the parts stay the same.
TEST(ConvMmaSums, AreTheDefinitionWithoutClusters) {
  const ConvCase given = plane_case(true, 4, 12, {1, 63, 113});
  const auto wanted = rounded<BFloat16>(by_cpu<ConvOp::kWgrad>(given));
  EXPECT_EQ((emulated<ConvOp::kWgrad, BFloat16, ConvMath::kTf32, 32>(
                given, launch::ThreadOrder::kForward, true)),
            wanted);
}

TEST(MmaSplits, CoverAllStepsWithoutWork) {
  for (const index_t tiles : {0, 1, 3, 7, 50, 131, 500}) {
    for (const index_t steps : {0, 1, 15, 16, 17, 33, 36, 72, 191, 192, 512, 4097}) {
      const auto splits = ops::MmaSplits::of(tiles, steps);
      EXPECT_LE(splits.cluster, launch::kMaxCluster);
      EXPECT_GE(index_t{splits.parts} * splits.cluster * splits.steps, steps);
      const auto alone = splits.alone();
      EXPECT_EQ(alone.parts, splits.parts);
      EXPECT_GE(index_t{alone.parts} * alone.steps, steps);
      EXPECT_TRUE(steps >= 16 || splits.parts * splits.cluster == 1);
    }
  }
}

// Arrays of numbers that are not exact in any format.
ConvCase inexact_case() {
  ConvCase given = large_case(true, 8, 12);
  for (Array* array : {&given.in, &given.weight, &given.out}) {
    Random random(7);
    for (double& value : array->memory) {
      value = (value + 2.5) * std::sin(static_cast<double>(random.between(1, 1 << 20)));
    }
  }
  return given;
}

// The largest error, relative to the sum of the sizes of the products (and of the target).
template <ConvOp kOp, class Storage, ConvMath kMath>
double relative_error() {
  const ConvCase given = inexact_case();
  ConvCase exact{Narrow<Storage>(given.in).widened(given.in),
                 Narrow<Storage>(given.weight).widened(given.weight),
                 Narrow<Storage>(given.out).widened(given.out), given.attributes};
  ConvCase sizes = exact;
  for (Array* array : {&sizes.in, &sizes.weight, &sizes.out}) {
    for (double& value : array->memory) value = std::abs(value);
  }
  const std::vector<double> wanted = by_cpu<kOp>(exact), size = by_cpu<kOp>(sizes);
  const std::vector<double> found =
      emulated<kOp, Storage, kMath, 32>(exact, launch::ThreadOrder::kForward);
  double worst = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    worst = std::max(worst, std::abs(found[i] - wanted[i]) / size[i]);
  }
  return worst;
}

template <ConvOp kOp>
void check_bounds() {
  // Each factor is rounded to 11 bits; then each product may be off by 2^-10 of its size.
  const double tf32 = relative_error<kOp, float, ConvMath::kTf32>();
  EXPECT_LT(tf32, std::exp2(-10) + 1e-5);
  EXPECT_GT(tf32, std::exp2(-16));  // it is actually rounded
  EXPECT_LT((relative_error<kOp, float, ConvMath::kTf32x3>()), std::exp2(-19));
  // The factors are exact: sums are in fp32, and the stored result is rounded.
  EXPECT_LT((relative_error<kOp, BFloat16, ConvMath::kTf32>()), std::exp2(-8) + 1e-5);
  EXPECT_LT((relative_error<kOp, Float16, ConvMath::kTf32>()), std::exp2(-11) + 1e-5);
}

TEST(ConvMmaErrors, OfForwardKeepToTheirBounds) { check_bounds<ConvOp::kForward>(); }
TEST(ConvMmaErrors, OfDgradKeepToTheirBounds) { check_bounds<ConvOp::kDgrad>(); }
TEST(ConvMmaErrors, OfWgradKeepToTheirBounds) { check_bounds<ConvOp::kWgrad>(); }

// Infinities and NaN in the operands that a slab brings: sums are infinite, of the right sign, or
// NaN where those of the definition are.
template <ConvOp kOp>
void check_special_values() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  ConvCase given = plane_case(true, 8, 12, {1, 6, 7});
  for (double& value : given.weight.memory) value = value < 0 ? value - 1 : value + 1;  // no zero
  if (kOp != ConvOp::kDgrad) {
    given.in.at({0, 0, 0, 3, 3}) = kInfinity;
    given.in.at({0, 1, 0, 0, 6}) = -kInfinity;
    given.in.at({1, 2, 0, 5, 0}) = NAN;
  }
  if (kOp != ConvOp::kForward) {
    given.out.at({0, 0, 0, 3, 3}) = -kInfinity;
    given.out.at({0, 1, 0, 0, 6}) = kInfinity;
    given.out.at({1, 2, 0, 5, 0}) = NAN;
  }
  const auto text = [](const std::vector<double>& values) {  // in which NaN is equal to NaN
    std::vector<std::string> found;
    for (const double value : values) {
      found.push_back(std::isnan(value) ? "NaN" : std::to_string(value));
    }
    return found;
  };
  const auto wanted = text(rounded<float>(by_cpu<kOp>(given)));
  for (const std::string special : {"inf", "-inf", "NaN"}) {
    EXPECT_GT(std::count(wanted.begin(), wanted.end(), special), 0) << special;
  }
  const auto found =
      text(emulated<kOp, float, ConvMath::kTf32x3, 32>(given, launch::ThreadOrder::kForward));
  EXPECT_EQ(found, wanted);
}

TEST(ConvMmaSpecialValues, OfForwardAreThoseOfTheDefinition) {
  check_special_values<ConvOp::kForward>();
}
TEST(ConvMmaSpecialValues, OfDgradAreThoseOfTheDefinition) {
  check_special_values<ConvOp::kDgrad>();
}
TEST(ConvMmaSpecialValues, OfWgradAreThoseOfTheDefinition) {
  check_special_values<ConvOp::kWgrad>();
}

TEST(ConvMmaWork, OfFourChannelsIsMostlyUseful) {
  const ConvCase given = large_case(true, 4, 32);
  const Narrow<BFloat16> in(given.in), weight(given.weight), out(given.out);
  const ConvProblem problem = ops::conv_problem(in.view, weight.view, out.view, given.attributes);
  using Forward = ops::ConvMmaBody<ConvOp::kForward, BFloat16, ConvMath::kTf32, 32>;
  using Dgrad = ops::ConvMmaBody<ConvOp::kDgrad, BFloat16, ConvMath::kTf32, 32>;
  using Wgrad = ops::ConvMmaBody<ConvOp::kWgrad, BFloat16, ConvMath::kTf32, 32>;
  const double rows = 840.0 / 848;  // positions in products of 16
  EXPECT_DOUBLE_EQ(Forward::make(problem, nullptr).useful(), rows * 36 / 48);
  EXPECT_DOUBLE_EQ(Dgrad::make(problem, nullptr).useful(), rows * 4 / 8);
  EXPECT_DOUBLE_EQ(Wgrad::make(problem, nullptr).useful(), rows * 36 / 48);
  EXPECT_EQ(Forward::make(problem, nullptr).products(), 53 * 4 * 3);
}

TEST(ConvMmaBody, HasNothingToDoWhereTheSlabReachesNothing) {
  ConvCase given = large_case(false, 4, 4);
  given.attributes.in_lo = {50, 0, 0};
  const Narrow<float> in(given.in), weight(given.weight), out(given.out);
  const ConvProblem problem = ops::conv_problem(in.view, weight.view, out.view, given.attributes);
  using Forward = ops::ConvMmaBody<ConvOp::kForward, float, ConvMath::kTf32, 32>;
  using Wgrad = ops::ConvMmaBody<ConvOp::kWgrad, float, ConvMath::kTf32, 32>;
  EXPECT_EQ(Forward::make(problem, nullptr).blocks(), 0);
  EXPECT_EQ(Wgrad::make(problem, nullptr).blocks(), 0);
}

TEST(ConvMmaBody, RefusesKernelsOfManyTapsByName) {
  Random random(3);
  const ConvCase given{Array(random, {1, 1, 6, 6, 6}),
                       Array(random, {1, 1, 6, 6, 6}),
                       Array(random, {1, 1, 6, 6, 6}),
                       {{0, 0, 0}, {0, 0, 0}, {1, 1, 1}, {2, 2, 2}, {1, 1, 1}, 1}};
  using Forward = ops::ConvMmaBody<ConvOp::kForward, float, ConvMath::kTf32, 32>;
  ConvCase copy = given;
  EXPECT_NE(Forward::refusal(copy.problem()).find("216 kernel indices"), std::string::npos);
}

TEST(Divisor, DividesAsTheProcessorDoes) {
  constexpr std::int32_t kLast = std::numeric_limits<std::int32_t>::max();
  for (const std::int32_t d : {1, 2, 3, 5, 7, 9, 128, 641, 65535, 1 << 30, kLast - 1, kLast}) {
    const auto divisor = ops::Divisor::by(d);
    for (const std::int32_t n : {0, 1, 2, d - 1, d, kLast / d * d - 1, kLast / d * d, kLast}) {
      EXPECT_EQ(divisor.quotient(n), n / d) << n << " / " << d;
    }
  }
}

TEST(Divisor, RefusesWhatDoesNotFitInto32Bits) {
  constexpr index_t kLast = std::numeric_limits<std::int32_t>::max();
  for (const index_t d : {index_t{0}, kLast + 1, index_t{1} << 32, (index_t{1} << 32) + 1}) {
    EXPECT_THROW(ops::Divisor::by(d), UsageError) << d;
  }
}

}  // namespace
}  // namespace pydist
