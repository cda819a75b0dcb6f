// Norms: the CPU backend and the emulated CUDA threads against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "core/errors.hpp"
#include "launch/emulate.hpp"
#include "ops/common/half.hpp"
#include "ops/norm/kernels.hpp"
#include "ops/norm/sums_body.hpp"
#include "ops/norm/write_body.hpp"
#include "random_cases.hpp"

namespace pydist {
namespace {

using ops::NormProblem;
using ops::NormShape;
using testing::Random;

template <class Storage>
DType dtype_of() {
  if constexpr (std::is_same_v<Storage, double>) return DType::kFloat64;
  if constexpr (std::is_same_v<Storage, float>) return DType::kFloat32;
  if constexpr (std::is_same_v<Storage, ops::BFloat16>) return DType::kBFloat16;
  if constexpr (std::is_same_v<Storage, ops::Float16>) return DType::kFloat16;
}

// Arrays whose memory has their exact size. x, grad and out may begin after some elements: a slice
// of a tensor is aligned to an element, and not to a vector.
template <class Storage>
struct Case {
  using T = ops::accumulator_t<Storage>;
  index_t begin;  // elements
  NormShape shape;
  double slope;
  bool learned;
  index_t parts;
  std::vector<Storage> x, grad, out;
  std::vector<T> values, coefficients;
  std::vector<double> sums;

  // Values are center + [-2, 2].
  static Case make(unsigned seed, double center, const NormShape* given = nullptr) {
    Random random(seed);
    Case test;
    // Vectors need channels or positions in multiples of their length, and aligned memory.
    const index_t unit = random.chance(0.5) ? random.between(1, 2) * 4 : 1;
    test.begin = random.chance(0.8) ? 0 : 1;
    test.shape = given != nullptr
                     ? *given
                     : NormShape{random.between(0, 3),
                                 unit * random.between(1, random.chance(0.3) ? 70 / unit : 5),
                                 unit * random.between(0, (random.chance(0.3) ? 500 : 40) / unit),
                                 random.chance(0.5), random.chance(0.5)};
    const double slopes[] = {1, 0, 0.125};
    test.slope = slopes[random.between(0, 2)];
    test.learned = random.chance(0.3);
    test.parts = random.chance(0.1) ? random.between(256, 600) : random.between(1, 5);
    const auto fill = [&](auto& array, index_t count, double middle) {
      using Element = typename std::remove_reference_t<decltype(array)>::value_type;
      for (index_t i = 0; i < count; ++i) {
        array.push_back(ops::store_as<Element>(
            static_cast<ops::accumulator_t<Element>>(middle + random.value())));
      }
    };
    fill(test.x, test.begin + test.shape.elements(), center);
    fill(test.grad, test.begin + test.shape.elements(), 0);
    test.out.resize(test.x.size());
    fill(test.values, test.shape.rows(), center);
    fill(test.values, 2 * test.shape.rows(), 0);
    if (test.learned) fill(test.values, test.shape.rows(), 0);
    fill(test.coefficients, 3 * test.shape.rows(), 0);
    const index_t sums = (test.learned ? 3 : 2) * test.parts * test.shape.rows();
    test.sums.assign(static_cast<std::size_t>(sums), std::nan(""));
    return test;
  }

  NormProblem problem() {
    return {dtype_of<Storage>(),
            shape,
            slope,
            learned,
            x.data() + begin,
            grad.data() + begin,
            out.data() + begin,
            values.data(),
            coefficients.data(),
            sums.data(),
            parts};
  }
  // Statistics ignore the activation.
  NormProblem plain() {
    NormProblem problem = this->problem();
    problem.learned = false;
    return problem;
  }

  // Calls f(row, element) for all elements.
  void each(const std::function<void(std::size_t, std::size_t)>& f) const {
    for (index_t n = 0; n < shape.samples; ++n) {
      for (index_t c = 0; c < shape.channels; ++c) {
        for (index_t p = 0; p < shape.positions; ++p) {
          f(static_cast<std::size_t>(shape.row(n, c)),
            static_cast<std::size_t>(begin + shape.offset(n, c, p)));
        }
      }
    }
  }

  double value(const std::vector<Storage>& array, std::size_t i) const {
    return static_cast<double>(ops::load_as(array[i]));
  }
  double given(const std::vector<T>& array, int which, std::size_t row) const {
    return static_cast<double>(array[static_cast<std::size_t>(which * shape.rows()) + row]);
  }
  double centered(std::size_t row, std::size_t i) const {
    return value(x, i) - given(values, 0, row);
  }
  double linear(std::size_t row, std::size_t i) const {
    return centered(row, i) * given(values, 1, row) + given(values, 2, row);
  }
  double slope_of(std::size_t row) const { return learned ? given(values, 3, row) : slope; }
  double gradient(std::size_t row, std::size_t i) const {
    return value(grad, i) * (linear(row, i) > 0 ? 1 : slope_of(row));
  }
};

// The expected results, by plain loops.
template <class Storage>
struct Wanted {
  std::vector<double> mean, m2, grads, products, slopes, out, grad_input;

  explicit Wanted(const Case<Storage>& test) {
    const auto rows = static_cast<std::size_t>(test.shape.rows());
    for (auto* sums : {&mean, &m2, &grads, &products, &slopes}) sums->assign(rows, 0);
    out.resize(test.x.size());
    grad_input.resize(test.x.size());
    const auto count = static_cast<double>(test.shape.values(test.shape.positions));
    test.each([&](std::size_t row, std::size_t i) { mean[row] += test.value(test.x, i) / count; });
    test.each([&](std::size_t row, std::size_t i) {
      const double off = test.value(test.x, i) - mean[row], g = test.gradient(row, i);
      const double y = test.linear(row, i), c = test.centered(row, i);
      m2[row] += off * off;
      grads[row] += g;
      products[row] += g * c;
      slopes[row] += y > 0 ? 0 : y * test.value(test.grad, i);
      out[i] = y > 0 ? y : y * test.slope_of(row);
      grad_input[i] =
          test.given(test.coefficients, 0, row) * g +
          (test.given(test.coefficients, 1, row) * c + test.given(test.coefficients, 2, row));
    });
  }
};

enum class Kernel { kMoments, kApply, kGradSums, kGradInput };

void on_cpu(Kernel kernel, const NormProblem& problem) {
  if (kernel == Kernel::kMoments) cpu::norm_moments(problem);
  if (kernel == Kernel::kApply) cpu::norm_apply(problem);
  if (kernel == Kernel::kGradSums) cpu::norm_grad_sums(problem);
  if (kernel == Kernel::kGradInput) cpu::norm_grad_input(problem);
}

template <class Storage>
void emulated(Kernel kernel, const NormProblem& problem, launch::ThreadOrder order) {
  const auto sum = [&]<bool kMoments, ops::Activation kActivation>() {
    ops::with_norm_sums_body<kMoments, kActivation, Storage>(
        problem, [&](const auto& body) { launch::emulate_tiles(body, order); });
    launch::emulate_tiles(ops::NormMergeBody<kMoments>{{}, problem}, order);
  };
  const auto write = [&]<bool kForward, ops::Activation kActivation>() {
    ops::with_norm_write_body<kForward, kActivation, Storage>(problem, [&](const auto& body) {
      if (body.rows() > 0) {
        launch::emulate_runs(body, launch::run_grid(body.rows(), body.run_length()), order);
      }
    });
  };
  ops::dispatch_activation(problem, [&](auto activation) {
    constexpr auto kActivation = decltype(activation)::value;
    if (kernel == Kernel::kMoments) sum.template operator()<true, kActivation>();
    if (kernel == Kernel::kGradSums) sum.template operator()<false, kActivation>();
    if (kernel == Kernel::kApply) write.template operator()<true, kActivation>();
    if (kernel == Kernel::kGradInput) write.template operator()<false, kActivation>();
  });
}

// `tolerance`: for sums, relative to the size of their terms; `rounding`: for elements.
template <class Storage>
void check(const Case<Storage>& given, double tolerance, double rounding,
           const std::string& where) {
  const Wanted<Storage> wanted(given);
  const auto rows = static_cast<std::size_t>(given.shape.rows());
  const auto count = static_cast<double>(given.shape.values(given.shape.positions));
  const auto expect_sums = [&](const Case<Storage>& test, const std::vector<double>& first,
                               const std::vector<double>& second, double first_size,
                               const std::string& what) {
    for (std::size_t r = 0; r < rows; ++r) {
      ASSERT_NEAR(test.sums[r], first[r], tolerance * first_size) << what << " of row " << r;
      ASSERT_NEAR(test.sums[rows + r], second[r], tolerance * 16 * (count + 1))
          << what << " of row " << r;
    }
  };
  const auto expect_elements = [&](const Case<Storage>& test, const std::vector<double>& elements,
                                   const std::string& what) {
    for (std::size_t i = 0; i < elements.size(); ++i) {
      ASSERT_NEAR(test.value(test.out, i), elements[i], rounding * (1 + std::abs(elements[i])))
          << what << " at " << i;
    }
  };
  for (int backend = 0; backend < 4; ++backend) {
    const std::string place =
        where + (backend == 0 ? ", cpu" : ", emulated") + std::to_string(backend) + ": ";
    const auto run = [&](Kernel kernel) {
      Case<Storage> test = given;
      const NormProblem problem = kernel == Kernel::kMoments ? test.plain() : test.problem();
      if (backend == 0) {
        on_cpu(kernel, problem);
      } else {
        emulated<Storage>(kernel, problem, launch::kThreadOrders[backend - 1]);
      }
      return test;
    };
    if (given.shape.elements() == 0) {
      expect_sums(run(Kernel::kMoments), wanted.mean, wanted.m2, 1, place + "moments");
    } else {
      expect_sums(run(Kernel::kMoments), wanted.mean, wanted.m2, 4, place + "moments");
      ASSERT_NO_FATAL_FAILURE(expect_elements(run(Kernel::kApply), wanted.out, place + "results"));
      ASSERT_NO_FATAL_FAILURE(
          expect_elements(run(Kernel::kGradInput), wanted.grad_input, place + "dL/dx"));
    }
    const Case<Storage> summed = run(Kernel::kGradSums);
    ASSERT_NO_FATAL_FAILURE(expect_sums(summed, wanted.grads, wanted.products, 4 * (count + 1),
                                        place + "gradient sums"));
    for (std::size_t r = 0; given.learned && r < rows; ++r) {
      ASSERT_NEAR(summed.sums[2 * rows + r], wanted.slopes[r], tolerance * 64 * (count + 1))
          << place << "gradient of slope " << r;
    }
  }
}

class Norm : public ::testing::TestWithParam<unsigned> {};

TEST_P(Norm, DoubleIsTheDefinition) {
  check(Case<double>::make(GetParam(), 0), 1e-13, 1e-14, "double");
}
// A plain sum of squares would have no correct digit: 1e4^2 = 1e8 with a variance of 1.
TEST_P(Norm, FloatKeepsItsDigitsFarFromZero) {
  check(Case<float>::make(GetParam(), 1e4), 1e-6, 1e-6, "float");
}
TEST_P(Norm, NarrowValuesAreSummedUpAndRoundedAsFloat) {
  check(Case<ops::BFloat16>::make(GetParam(), 0), 1e-6, 1.0 / 256, "bfloat16");
  check(Case<ops::Float16>::make(GetParam(), 0), 1e-6, 1.0 / 2048, "float16");
}

INSTANTIATE_TEST_SUITE_P(Random, Norm, ::testing::Range(0u, 40u));

// How many of the random cases use vectors.
TEST(NormVectors, AreReachedInBothOrders) {
  int wide[2] = {};
  for (unsigned seed = 0; seed < 40; ++seed) {
    auto test = Case<ops::BFloat16>::make(seed, 0);
    const NormProblem problem = test.problem();
    const bool fits = ops::has_norm_vectors<ops::BFloat16>(
        problem, {problem.x, problem.out}, {problem.values, problem.coefficients}, 8);
    wide[test.shape.channels_last] += fits && test.shape.elements() > 0;
  }
  for (const int count : wide) {
    EXPECT_GE(count, 3);
    EXPECT_LE(count, 15);
  }
}

// Blocks, pieces and several tasks.
TEST(NormLong, LongLinesAreTheDefinition) {
  for (const bool channels_last : {false, true}) {
    for (const index_t channels : {1, 3, 16, 160}) {
      const NormShape shape{2, channels, 30000 / channels + 5000, channels_last, false};
      check(Case<float>::make(static_cast<unsigned>(channels), 1e4, &shape), 1e-6, 1e-6, "long");
    }
  }
}

// 512^3 x 32 values: beyond the indices that 32 bits hold. No memory is needed to find the last
// run.
template <bool kChannelsLast>
void check_large() {
  NormProblem problem{};
  problem.shape = {1, 32, 512 * 512 * 512, kChannelsLast, false};
  constexpr int kWide = 8;
  const auto body =
      ops::NormWriteBody<true, kChannelsLast, ops::Activation::kNone, ops::BFloat16, kWide>::make(
          problem);
  const auto last = body.row(body.rows() - 1);
  EXPECT_EQ(last.begin + last.count * kWide, index_t{1} << 32);
}

TEST(NormLarge, TheLastRunEndsWithTheArray) {
  check_large<false>();
  check_large<true>();
}

TEST(NormLarge, MorePiecesThanADeviceCountsAreRefused) {
  NormProblem problem{};
  problem.shape = {1 << 20, 1 << 12, 1, false, true};
  using Body = ops::NormWriteBody<true, false, ops::Activation::kNone, float, 1>;
  EXPECT_THROW(Body::make(problem), UsageError);
}

TEST(NormActivation, NaNStaysAndInfinityIsCutOff) {
  const NormShape shape{1, 1, 4, false, false};
  Case<float> test = Case<float>::make(0, 0, &shape);
  test.begin = 0;
  test.out.assign(4, 0);
  test.x = {std::nanf(""), -INFINITY, INFINITY, 0};
  test.values = {0, 1, 0};
  test.slope = 0;
  test.learned = false;
  cpu::norm_apply(test.problem());
  EXPECT_TRUE(std::isnan(test.out[0]));
  EXPECT_EQ(test.out[1], 0);
  EXPECT_EQ(test.out[2], INFINITY);
  EXPECT_EQ(test.out[3], 0);
  test.grad = {1, NAN, 2, NAN};
  test.coefficients = {1, 0, 0};
  test.x = {1, -1, 2, 0};
  cpu::norm_grad_input(test.problem());
  EXPECT_EQ(test.out, (std::vector<float>{1, 0, 2, 0}));
}

}  // namespace
}  // namespace pydist
