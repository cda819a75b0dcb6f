// Maxima over pooling windows: the CPU backend and the emulated CUDA threads against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "launch/emulate.hpp"
#include "ops/pool/kernels.hpp"
#include "ops/pool/max_choice.hpp"
#include "pool_arrays.hpp"

namespace pydist {
namespace {

using ops::MaxOp;
using ops::MaxProblem;
using testing::Array;
using testing::for_each_index;
using testing::Random;
using testing::Storing;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class Storage, class Tap>
struct MaxCase {
  Array<Storage> in, out;
  Array<Tap> taps;
  ops::PoolAttributes attributes;
  bool accumulate;

  MaxProblem problem() const {
    return ops::max_problem(in.view, out.view, taps.view, attributes, accumulate);
  }

  static MaxCase from(const MaxCase<double, Tap>& other) {
    return {Array<Storage>(other.in), Array<Storage>(other.out), other.taps, other.attributes,
            other.accumulate};
  }

  // Calls f(i, number) for the inputs of an output's window that are in the array.
  template <class F>
  void for_taps(const Coords& o, const F& f) const {
    const auto& [in_lo, out_lo, footprints] = attributes;
    Coords count(3), kernel(3);
    for (int dim = 0; dim < 3; ++dim) {
      const Footprint& along = footprints[static_cast<std::size_t>(dim)];
      const auto [lo, hi] = along.needs(out_lo[dim] + o[2 + dim], out_lo[dim] + o[2 + dim] + 1);
      kernel[dim] = along.kernel();
      count[dim] = (hi - lo - 1) / along.dilation() + 1;
    }
    for_each_index(Box(Coords(3), count), [&](const Coords& k) {
      Coords i = o;
      for (int dim = 0; dim < 3; ++dim) {
        const Footprint& along = footprints[static_cast<std::size_t>(dim)];
        i[2 + dim] = along.needs(out_lo[dim] + o[2 + dim], out_lo[dim] + o[2 + dim] + 1).first +
                     k[dim] * along.dilation() - in_lo[dim];
        if (i[2 + dim] < 0 || i[2 + dim] >= in.view.shape[2 + dim]) return;
      }
      f(i, (k[0] * kernel[1] + k[1]) * kernel[2] + k[2]);
    });
  }

  // In forward, maxima of other inputs may exist already; else, taps like those of forward.
  static MaxCase make(unsigned seed, bool forward) {
    Random random(seed);
    Coords in{2, 1, 0, 0, 0}, out{2, 1, 0, 0, 0}, in_lo(3), out_lo(3);
    Storing storing(random);
    in[1] = out[1] = storing.channels();
    const bool adaptive = random.chance(0.2), disjoint = random.chance(0.5);
    std::vector<Footprint> footprints;
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
        footprints.emplace_back(random.between(1, disjoint ? stride : 5), stride,
                                disjoint ? 1 : random.between(1, 2), padding, padding);
        in_lo[dim] = random.between(-4, 6);
        out_lo[dim] = in_lo[dim] / stride + random.between(-1, 2);
      }
    }
    auto in_array = storing.array<Storage>(in);
    for (double& value : in_array.memory) {
      if (random.chance(0.02)) value = std::nan("");
      if (random.chance(0.3)) value = -kInfinity;
    }
    MaxCase test{in_array,
                 storing.array<Storage>(out),
                 storing.array<Tap>(out),
                 {in_lo, out_lo, footprints},
                 false};
    test.find();
    if (forward) {
      for (double& value : test.in.memory) value = random.value();
    } else {
      for (double& value : test.out.memory) value = random.value();
    }
    test.accumulate = random.chance(0.5);
    return test;
  }

  // torch's loop.
  void find() {
    for_each_index(Box(Coords(5), out.view.shape), [&](const Coords& o) {
      double best = -kInfinity;
      index_t taken = ops::kNoTap<Tap>;
      for_taps(o, [&](const Coords& i, index_t number) {
        const double value = in.at(i);
        if (taken == ops::kNoTap<Tap>) taken = number;
        if (value > best || std::isnan(value)) {
          best = value;
          taken = number;
        }
      });
      if (accumulate) {
        const double before = out.at(o);
        const bool kept = std::isnan(before) || std::isnan(best)
                              ? !std::isnan(best) || (std::isnan(before) && taps.at(o) > taken)
                              : before > best || (before == best && taps.at(o) <= taken);
        if (kept) return;
      }
      out.at(o) = best;
      taps.at(o) = static_cast<Tap>(taken);
    });
  }

  void spread() {
    in.fill(0);
    for_each_index(Box(Coords(5), out.view.shape), [&](const Coords& o) {
      for_taps(o, [&](const Coords& i, index_t number) {
        if (number == taps.at(o)) in.at(i) += out.at(o);
      });
    });
  }

  void pick() {
    for_each_index(Box(Coords(5), out.view.shape), [&](const Coords& o) {
      if (!accumulate) out.at(o) = 0;
      for_taps(o, [&](const Coords& i, index_t number) {
        if (number == taps.at(o)) out.at(o) = in.at(i);
      });
    });
  }
};

template <MaxOp kOp, class Storage, class Tap>
void check_case(unsigned seed) {
  const auto exact = MaxCase<double, Tap>::make(seed, kOp == MaxOp::kForward);
  MaxCase<double, Tap> wanted = exact;
  if constexpr (kOp == MaxOp::kForward) wanted.find();
  if constexpr (kOp == MaxOp::kBackward) wanted.spread();
  if constexpr (kOp == MaxOp::kPick) wanted.pick();
  using Case = MaxCase<Storage, Tap>;
  const Case given = Case::from(exact), rounded = Case::from(wanted);
  const auto expect_equal = [&](const Case& found, const std::string& where) {
    ASSERT_EQ(found.in.numbers(), rounded.in.numbers()) << where;
    ASSERT_EQ(found.out.numbers(), rounded.out.numbers()) << where;
    ASSERT_EQ(found.taps.memory, rounded.taps.memory) << where;
  };
  Case on_cpu = given;
  (kOp == MaxOp::kForward    ? cpu::pool_max_forward
   : kOp == MaxOp::kBackward ? cpu::pool_max_backward
                             : cpu::pool_max_pick)(on_cpu.problem());
  expect_equal(on_cpu, "cpu, seed " + std::to_string(seed));
  for (const launch::ThreadOrder order : launch::kThreadOrders) {
    Case emulated = given;
    ops::with_max_body<kOp, Storage, Tap>(emulated.problem(), [&](const auto& body) {
      if (body.rows() > 0) {
        launch::emulate_runs(body, launch::run_grid(body.rows(), body.run_length()), order);
      }
    });
    expect_equal(emulated, "emulated in order " + std::to_string(static_cast<int>(order)) +
                               ", seed " + std::to_string(seed));
  }
}

// uint8 taps with all types, int32 taps with the longest and the shortest vectors.
template <MaxOp kOp>
void check_types(unsigned seed) {
  check_case<kOp, double, std::uint8_t>(seed);
  check_case<kOp, double, std::int32_t>(seed);
  check_case<kOp, float, std::uint8_t>(seed);
  check_case<kOp, ops::Float16, std::uint8_t>(seed);
  check_case<kOp, ops::BFloat16, std::uint8_t>(seed);
  check_case<kOp, ops::BFloat16, std::int32_t>(seed);
}

class PoolMax : public ::testing::TestWithParam<unsigned> {};

TEST_P(PoolMax, ForwardIsTheDefinition) { check_types<MaxOp::kForward>(GetParam()); }
TEST_P(PoolMax, BackwardIsTheDefinition) { check_types<MaxOp::kBackward>(GetParam()); }
TEST_P(PoolMax, PickIsTheDefinition) { check_types<MaxOp::kPick>(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Random, PoolMax, ::testing::Range(0u, 60u));

// How many of the random cases use vectors, and how many scatter.
TEST(PoolMaxBodies, AreAllReached) {
  int wide = 0, scattered = 0, wide_scattered = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    const auto exact = MaxCase<double, std::uint8_t>::make(seed, false);
    auto test = MaxCase<ops::BFloat16, std::uint8_t>::from(exact);
    const MaxProblem problem = test.problem();
    const bool vectors = problem.has_vectors(8, 2, 1), scatters = problem.has_disjoint_windows();
    wide += vectors;
    scattered += scatters;
    wide_scattered += vectors && scatters;
  }
  EXPECT_GE(wide_scattered, 5);
  EXPECT_GE(wide - wide_scattered, 5);
  EXPECT_GE(scattered - wide_scattered, 5);
  EXPECT_LE(wide + scattered - wide_scattered, 55);
}

}  // namespace
}  // namespace pydist
