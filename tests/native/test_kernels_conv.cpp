// Boundary convolution: the CPU backend and the emulated CUDA tiles against plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "cpu/boundary_conv.hpp"
#include "kernels/conv_tile.hpp"
#include "launch/emulate.hpp"
#include "random_cases.hpp"

namespace pydist {
namespace {

using kernels::ConvAttributes;
using kernels::ConvOp;
using kernels::ConvProblem;
using testing::for_each_index;
using testing::offset_of;
using testing::Random;

// An array in memory of exactly its size, in some memory order.
struct Array {
  std::vector<double> memory;
  TensorView view;

  Array(Random& random, const Coords& shape) {
    memory.resize(static_cast<std::size_t>(volume_of(shape)));
    for (double& value : memory) value = random.value();
    view = {memory.data(), DType::kFloat64, shape, random.strides_for(shape), {}};
  }
  Array(const Array& other) : memory(other.memory), view(other.view) { view.data = memory.data(); }
  Array& operator=(const Array&) = delete;

  double& at(const Coords& index) {
    return memory[static_cast<std::size_t>(offset_of(index, view.strides))];
  }
};

struct ConvCase {
  Array in, weight, out;
  ConvAttributes attributes;
  double negative_slope = 1;

  ConvProblem problem() const {
    return kernels::conv_problem(in.view, weight.view, out.view, attributes, negative_slope);
  }

  static ConvCase make(unsigned seed) {
    Random random(seed);
    Coords kernel(3), in(3), out(3), in_lo(3), out_lo(3), stride(3), padding(3), dilation(3);
    const int thin = static_cast<int>(random.between(0, 2));
    for (int dim = 0; dim < 3; ++dim) {
      kernel[dim] = random.between(1, 4);
      in[dim] = dim == thin ? random.between(0, 2) : random.between(1, 7);
      out[dim] = random.between(1, 7);
      stride[dim] = random.between(1, 3);
      padding[dim] = random.between(0, 2);
      dilation[dim] = random.between(1, 2);
      in_lo[dim] = random.between(-4, 6);
      out_lo[dim] = in_lo[dim] / stride[dim] + random.between(-1, 2);
    }
    const index_t batch = random.between(1, 2), groups = random.between(1, 2);
    const index_t ci = random.between(1, 4), co = random.chance(0.2) ? 34 : random.between(1, 9);
    return {Array(random, {batch, groups * ci, in[0], in[1], in[2]}),
            Array(random, {groups * co, ci, kernel[0], kernel[1], kernel[2]}),
            Array(random, {batch, groups * co, out[0], out[1], out[2]}),
            {in_lo, out_lo, stride, padding, dilation, groups}};
  }

  // Calls f(in, weight, out element) for every triple that takes part.
  template <class F>
  void triples(const F& f) {
    const auto& [in_lo, out_lo, stride, padding, dilation, groups] = attributes;
    const index_t co_of_group = weight.view.shape[0] / groups;
    for_each_index(Box(Coords(5), out.view.shape), [&](const Coords& o) {
      Coords first(5), last = weight.view.shape;
      first[0] = o[1];
      last[0] = o[1] + 1;
      for_each_index(Box(first, last), [&](const Coords& w) {
        Coords i{o[0], w[0] / co_of_group * weight.view.shape[1] + w[1], 0, 0, 0};
        for (int dim = 0; dim < 3; ++dim) {
          i[2 + dim] = (out_lo[dim] + o[2 + dim]) * stride[dim] - padding[dim] +
                       w[2 + dim] * dilation[dim] - in_lo[dim];
          if (i[2 + dim] < 0 || i[2 + dim] >= in.view.shape[2 + dim]) return;
        }
        f(in.at(i), weight.at(w), out.at(o));
      });
    });
  }
};

template <ConvOp kOp>
Array expected(const ConvCase& given) {
  ConvCase sums = given;  // targets are read and written here, operands in `given`
  ConvCase operands = given;
  Array& target = kOp == ConvOp::kForward ? sums.out
                  : kOp == ConvOp::kDgrad ? sums.in
                                          : sums.weight;
  const Array& source = kOp == ConvOp::kForward ? operands.out
                        : kOp == ConvOp::kDgrad ? operands.in
                                                : operands.weight;
  std::set<std::size_t> reached;
  operands.triples([&](double& x, double& w, double& y) {
    const double* const element = kOp == ConvOp::kForward ? &y : kOp == ConvOp::kDgrad ? &x : &w;
    const double product = kOp == ConvOp::kForward ? w * x : kOp == ConvOp::kDgrad ? w * y : x * y;
    const auto place = static_cast<std::size_t>(element - source.memory.data());
    target.memory[place] += product;
    reached.insert(place);
  });
  for (const std::size_t place : reached) {
    double& value = target.memory[place];
    if (value < 0 && kOp == ConvOp::kForward) value *= given.negative_slope;
  }
  return target;
}

template <ConvOp kOp>
const Array& target_of(const ConvCase& test) {
  if constexpr (kOp == ConvOp::kForward) return test.out;
  if constexpr (kOp == ConvOp::kDgrad) return test.in;
  if constexpr (kOp == ConvOp::kWgrad) return test.weight;
}

// Values are multiples of 1/8 and sums short, so that even their order does not matter in fp64.
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
    launch::emulate_tiles(kernels::ConvTileBody<kOp, double>::make(emulated.problem()), order);
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

// Neighbouring taps: the outputs that a slab reaches leave no holes.
TEST_P(BoundaryConv, ForwardRectifiesWhatItReaches) {
  for (const double slope : {0.0, 0.25}) {
    ConvCase given = ConvCase::make(GetParam());
    given.attributes.stride = given.attributes.dilation = {1, 1, 1};
    given.negative_slope = slope;
    check_case<ConvOp::kForward>(given, GetParam());
  }
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

TEST(ConvTile, HasNothingToDoWhereTheSlabReachesNothing) {
  Random random(2);
  const ConvCase far{Array(random, {1, 2, 1, 4, 4}),
                     Array(random, {2, 2, 3, 3, 3}),
                     Array(random, {1, 2, 4, 4, 4}),
                     {{50, 0, 0}, {0, 0, 0}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 1}};
  using Forward = kernels::ConvTileBody<ConvOp::kForward, double>;
  using Wgrad = kernels::ConvTileBody<ConvOp::kWgrad, double>;
  EXPECT_EQ(Forward::make(far.problem()).blocks(), 0);
  EXPECT_EQ(Wgrad::make(far.problem()).blocks(), 0);
}

}  // namespace
}  // namespace pydist
