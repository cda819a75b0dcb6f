// Computations of norms per row: the CPU backend and the emulated CUDA threads against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "launch/emulate.hpp"
#include "ops/norm/kernels.hpp"
#include "ops/norm/rows_body.hpp"
#include "random_cases.hpp"

namespace pydist {
namespace {

using ops::NormParts;
using ops::NormRows;
using testing::Random;

std::vector<double> random_numbers(Random& random, index_t count, double center = 0) {
  std::vector<double> numbers;
  for (index_t i = 0; i < count; ++i) numbers.push_back(center + random.value());
  return numbers;
}

template <class T>
std::vector<T> as(const std::vector<double>& numbers) {
  return {numbers.begin(), numbers.end()};
}

std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

// Arrays whose memory has their exact size.
template <class T>
struct Case {
  index_t samples, channels, members;
  bool centered, has_scale, has_shift;
  std::vector<double> moments, sums, totals, affine;
  std::vector<T> scale, shift, slopes, values, coefficients;

  index_t rows() const { return samples * channels; }
  index_t statistics() const { return rows() / members; }

  static Case make(unsigned seed, double center) {
    Random random(seed);
    Case test;
    test.members = random.chance(0.5) ? 1 : random.between(2, 4);
    test.samples = random.between(0, 3);
    test.channels = test.members * random.between(1, random.chance(0.3) ? 40 : 4);
    test.centered = random.chance(0.7);
    test.has_scale = random.chance(0.7);
    test.has_shift = random.chance(0.7);
    const index_t groups = test.statistics();
    test.moments.assign(at(groups), random.chance(0.2) ? 0 : 12);
    for (const double mean : random_numbers(random, groups, center)) test.moments.push_back(mean);
    for (const double m2 : random_numbers(random, groups, 2)) test.moments.push_back(m2);
    test.scale = as<T>(random_numbers(random, test.channels));
    test.shift = as<T>(random_numbers(random, test.channels));
    test.slopes = as<T>(random_numbers(random, random.chance(0.3) ? 1 : test.channels));
    test.sums = random_numbers(random, 2 * test.rows());
    test.values.assign(at(4 * test.rows()), T(std::nan("")));
    test.totals.assign(at(2 * groups), std::nan(""));
    test.affine.assign(at(2 * test.channels), std::nan(""));
    test.coefficients.assign(at(3 * test.rows()), T(std::nan("")));
    return test;
  }

  NormRows norm() {
    return {sizeof(T) == 8,
            centered,
            statistics(),
            members,
            channels,
            0.25,
            moments.data(),
            has_scale ? scale.data() : nullptr,
            has_shift ? shift.data() : nullptr,
            nullptr,
            values.data(),
            sums.data(),
            totals.data(),
            affine.data(),
            coefficients.data()};
  }
  NormRows for_slopes() {
    NormRows norm = this->norm();
    norm.slopes = slopes.data();
    norm.channels = static_cast<index_t>(slopes.size());
    return norm;
  }

  double count() const { return moments.empty() ? 1 : std::max(moments[0], 1.0); }
  double mean(index_t row) const {
    return centered ? moments[at(statistics() + row / members)] : 0;
  }
  double deviation(index_t row) const {
    const double mean = moments[at(statistics() + row / members)];
    double squares = moments[at(2 * statistics() + row / members)];
    if (!centered) squares += moments[0] * mean * mean;
    return std::sqrt(squares / count() + 0.25);
  }
  double of(const std::vector<T>& numbers, bool is_there, index_t row, double otherwise) const {
    return is_there ? static_cast<double>(numbers[at(row % channels)]) : otherwise;
  }
  double products(index_t row) const {
    const double rounded = static_cast<double>(values[at(row)]);
    return sums[at(rows() + row)] + sums[at(row)] * (rounded - mean(row));
  }
};

enum class Kernel { kValues, kTotals, kCoefficients, kSlopes };

template <class T>
void run(Kernel kernel, const NormRows& norm, int backend) {
  if (backend == 0) {
    if (kernel == Kernel::kValues) cpu::norm_values(norm);
    if (kernel == Kernel::kTotals) cpu::norm_totals(norm);
    if (kernel == Kernel::kCoefficients) cpu::norm_coefficients(norm);
    if (kernel == Kernel::kSlopes) cpu::norm_slopes(norm);
    return;
  }
  const auto emulated = [&](const auto& body) {
    if (body.entries() == 0) return;
    launch::emulate_runs(body, launch::run_grid(body.rows(), body.kRun),
                         launch::kThreadOrders[backend - 1]);
  };
  if (kernel == Kernel::kValues) emulated(ops::NormValuesBody<T>{{{}, norm}});
  if (kernel == Kernel::kTotals) emulated(ops::NormTotalsBody<T>{{{}, norm}});
  if (kernel == Kernel::kCoefficients) emulated(ops::NormCoefficientsBody<T>{{{}, norm}});
  if (kernel == Kernel::kSlopes) emulated(ops::NormSlopesBody<T>{{{}, norm}});
}

// `rounding`: relative rounding of T.
template <class T>
void check(unsigned seed, double center, double rounding) {
  for (int backend = 0; backend < 4; ++backend) {
    const std::string place =
        "seed " + std::to_string(seed) + ", backend " + std::to_string(backend);
    Case<T> test = Case<T>::make(seed, center);
    const auto near = [&](T found, double wanted, double size) {
      ASSERT_NEAR(static_cast<double>(found), wanted, rounding * size) << place;
    };
    const index_t rows = test.rows();
    run<T>(Kernel::kValues, test.norm(), backend);
    for (index_t r = 0; r < rows; ++r) {
      const double mean = test.mean(r),
                   factor = test.of(test.scale, test.has_scale, r, 1) / test.deviation(r);
      near(test.values[at(r)], mean, 1 + std::abs(mean));
      near(test.values[at(rows + r)], factor, 8);
      // For any x, the transform is exact except for the last roundings.
      const double rounded = static_cast<double>(test.values[at(r)]);
      near(test.values[at(2 * rows + r)],
           (rounded - mean) * factor + test.of(test.shift, test.has_shift, r, 0), 8);
    }
    run<T>(Kernel::kTotals, test.norm(), backend);
    for (index_t g = 0; g < test.statistics(); ++g) {
      double first = 0, second = 0;
      for (index_t r = g * test.members; r < (g + 1) * test.members; ++r) {
        first += test.of(test.scale, test.has_scale, r, 1) * test.sums[at(r)];
        second += test.of(test.scale, test.has_scale, r, 1) * test.products(r);
      }
      ASSERT_NEAR(test.totals[at(g)], first, 1e-12) << place;
      ASSERT_NEAR(test.totals[at(test.statistics() + g)], second, 1e-12) << place;
    }
    for (index_t c = 0; c < test.channels; ++c) {
      double of_shift = 0, of_scale = 0;
      for (index_t r = c; r < rows; r += test.channels) {
        of_shift += test.sums[at(r)];
        of_scale += test.products(r) / test.deviation(r);
      }
      ASSERT_NEAR(test.affine[at(c)], of_shift, 1e-12) << place;
      ASSERT_NEAR(test.affine[at(test.channels + c)], of_scale, 1e-12) << place;
    }
    run<T>(Kernel::kCoefficients, test.norm(), backend);
    for (index_t r = 0; r < rows; ++r) {
      const index_t g = r / test.members;
      const double s = test.deviation(r), n = test.count();
      const double b = -test.totals[at(test.statistics() + g)] / (n * s * s * s);
      const double lost = test.mean(r) - static_cast<double>(test.values[at(r)]);
      const double d = -b * lost - (test.centered ? test.totals[at(g)] / (n * s) : 0);
      near(test.coefficients[at(r)], test.of(test.scale, test.has_scale, r, 1) / s, 8);
      near(test.coefficients[at(rows + r)], b, 64);
      near(test.coefficients[at(2 * rows + r)], d, 64);
    }
    run<T>(Kernel::kSlopes, test.for_slopes(), backend);
    for (index_t r = 0; r < rows; ++r) {
      ASSERT_EQ(test.values[at(3 * rows + r)], test.slopes[at(r) % test.slopes.size()]) << place;
    }
  }
}

class NormRowsOf : public ::testing::TestWithParam<unsigned> {};

TEST_P(NormRowsOf, DoubleIsTheDefinition) { check<double>(GetParam(), 0, 1e-14); }
TEST_P(NormRowsOf, FloatKeepsItsDigitsFarFromZero) { check<float>(GetParam(), 1e4, 1e-7); }

// Comparison with the moments of the values themselves; some parts are empty.
TEST_P(NormRowsOf, PartsMerge) {
  Random random(GetParam());
  const index_t parts = random.between(1, 5), groups = random.between(1, 40);
  std::vector<double> n, mean, m2;  // [groups][parts], so that strides are not those of C order
  std::vector<std::vector<double>> all(at(groups));
  for (auto& values : all) {
    for (index_t part = 0; part < parts; ++part) {
      const std::vector<double> own = random_numbers(random, random.between(0, 4), 1e4);
      double sum = 0, squares = 0;
      for (const double value : own) sum += value;
      const double middle = own.empty() ? 0 : sum / static_cast<double>(own.size());
      for (const double value : own) squares += (value - middle) * (value - middle);
      n.push_back(static_cast<double>(own.size()));
      mean.push_back(middle);
      m2.push_back(squares);
      values.insert(values.end(), own.begin(), own.end());
    }
  }
  for (int backend = 0; backend < 4; ++backend) {
    std::vector<double> out(at(3 * groups), std::nan(""));
    const NormParts given{parts,      groups,     n.data(),   mean.data(), m2.data(),
                          {1, parts}, {1, parts}, {1, parts}, out.data()};
    if (backend == 0) {
      cpu::norm_merge_parts(given);
    } else {
      const ops::NormMergePartsBody body{{}, given};
      launch::emulate_runs(body, launch::run_grid(body.rows(), body.kRun),
                           launch::kThreadOrders[backend - 1]);
    }
    for (index_t g = 0; g < groups; ++g) {
      const auto& values = all[at(g)];
      double sum = 0, squares = 0;
      for (const double value : values) sum += value;
      const double middle = values.empty() ? 0 : sum / static_cast<double>(values.size());
      for (const double value : values) squares += (value - middle) * (value - middle);
      ASSERT_EQ(out[at(g)], static_cast<double>(values.size()));
      ASSERT_NEAR(out[at(groups + g)], middle, 1e-10);
      ASSERT_NEAR(out[at(2 * groups + g)], squares, 1e-9);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Random, NormRowsOf, ::testing::Range(0u, 60u));

// Equal values have no deviation at all, in any partition.
TEST(NormRowsExact, EqualMeansMergeExactly) {
  const double n[] = {3, 7, 11}, mean[] = {0.1, 0.1, 0.1}, m2[] = {0, 0, 0};
  double out[3];
  cpu::norm_merge_parts({3, 1, n, mean, m2, {1, 0}, {1, 0}, {1, 0}, out});
  EXPECT_EQ(out[1], 0.1);
  EXPECT_EQ(out[2], 0);
}

}  // namespace
}  // namespace pydist
