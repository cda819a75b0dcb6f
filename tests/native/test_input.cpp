// Conversion of stored numbers to inputs: the CPU and emulated CUDA threads against a plain loop.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "launch/emulate.hpp"
#include "ops/input/body_of_views.hpp"
#include "ops/input/kernels.hpp"
#include "random_cases.hpp"

namespace pydist {
namespace {

using testing::for_each_index;
using testing::offset_of;
using testing::Random;

// A block and its input with their memory, each in its own order. The vectors have exact sizes, so
// that the address sanitizer finds every access outside.
template <class From, class To>
struct ConvertCase {
  Coords shape;
  std::vector<From> stored;
  std::vector<To> input, expected;
  TensorView from, to;
  std::int32_t found = 0;

  ConvertCase(unsigned seed, DType from_dtype, DType to_dtype) : shape(4) {
    Random random(seed);
    for (int dim = 0; dim < 3; ++dim) shape[dim] = random.between(1, 5);
    shape[3] = random.between(1, 90);
    const auto size = static_cast<std::size_t>(volume_of(shape));
    for (std::size_t i = 0; i < size; ++i) {
      stored.push_back(static_cast<From>(random.between(-60, 60)));
    }
    input.assign(size, std::numeric_limits<To>::quiet_NaN());
    expected.assign(size, To{});
    from = {stored.data(), from_dtype, shape, random.strides_for(shape), {}};
    to = {input.data(), to_dtype, shape, random.strides_for(shape), {}};
  }

  TensorView found_view() { return {&found, DType::kInt32, Coords{1}, Coords{1}, {}}; }

  // expected = map(channel, stored value)
  template <class Map>
  void expect(const Map& map) {
    for_each_index(Box(Coords(4), shape), [&](const Coords& at) {
      expected[static_cast<std::size_t>(offset_of(at, to.strides))] =
          map(at[0], stored[static_cast<std::size_t>(offset_of(at, from.strides))]);
    });
  }

  // Runs the kernel on the CPU, and emulated in several orders and group widths.
  template <class OnCpu, class WithBody>
  void check(const OnCpu& on_cpu, const WithBody& with_body) {
    on_cpu();
    EXPECT_EQ(input, expected);
    for (const launch::ThreadOrder order : launch::kThreadOrders) {
      for (const index_t words : {1, 4, 90}) {
        std::ranges::fill(input, std::numeric_limits<To>::quiet_NaN());
        with_body([&](const auto& body) {
          launch::emulate_runs(body, launch::run_grid(body.rows(), words), order);
        });
        EXPECT_EQ(input, expected);
      }
    }
    EXPECT_EQ(found, 0);
  }
};

class Convert : public ::testing::TestWithParam<unsigned> {};

TEST_P(Convert, LooksUpBytes) {
  ConvertCase<std::int8_t, float> c(GetParam(), DType::kInt8, DType::kFloat32);
  std::vector<float> table(static_cast<std::size_t>(c.shape[0]) * 256);
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<float>(i) / 3;
  const TensorView view{table.data(), DType::kFloat32, Coords{c.shape[0], 256}, Coords{256, 1}, {}};
  c.expect([&](index_t channel, std::int8_t value) {
    return table[static_cast<std::size_t>(channel * 256 + static_cast<std::uint8_t>(value))] / 7;
  });
  c.check([&] { cpu::look_up(c.from, view, 7, c.to, c.found_view()); },
          [&](const auto& run) { ops::look_up_body(c.from, view, 7, c.to, c.found_view(), run); });
}

// Rows that are contiguous on both sides, which begin at any element.
template <class From, class To>
void look_up_in_vectors(DType from_dtype, DType to_dtype) {
  constexpr index_t kEntries = index_t{1} << 8 * sizeof(From);
  std::vector<To> table(2 * static_cast<std::size_t>(kEntries));
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<To>(i) / 3;
  const TensorView entries{table.data(), to_dtype, Coords{2, kEntries}, Coords{kEntries, 1}, {}};
  for (const index_t width : {1, 3, 4, 31, 64, 129, 600}) {
    for (const index_t pad : {0, 1, 4}) {
      for (const auto& [skipped, skipped_to] : {std::pair{0, 0}, {1, 1}, {3, 7}, {0, 1}, {2, 0}}) {
        const Coords shape{2, 2, 3, width};
        const index_t pitch = width + pad;
        const Coords strides{6 * pitch, 3 * pitch, pitch, 1};
        std::vector<From> stored(static_cast<std::size_t>(skipped + 12 * pitch));
        for (std::size_t i = 0; i < stored.size(); ++i) stored[i] = static_cast<From>(i * 37);
        std::vector<To> room(static_cast<std::size_t>(skipped_to + 12 * pitch), To{-1});
        auto expected = room;
        std::int32_t found = 0;
        const TensorView from{stored.data() + skipped, from_dtype, shape, strides, {}};
        const TensorView to{room.data() + skipped_to, to_dtype, shape, strides, {}};
        const TensorView flag{&found, DType::kInt32, Coords{1}, Coords{1}, {}};
        for (const double divisor : {1.0, 7.0}) {
          for_each_index(Box(Coords(4), shape), [&](const Coords& at) {
            const auto offset = static_cast<std::size_t>(offset_of(at, strides));
            const auto entry = static_cast<std::size_t>(
                at[0] * kEntries + stored[static_cast<std::size_t>(skipped) + offset]);
            expected[static_cast<std::size_t>(skipped_to) + offset] =
                table[entry] / static_cast<To>(divisor);
          });
          for (const int lanes : {1, 4, 32}) {
            std::ranges::fill(room, To{-1});
            ops::look_up_body(from, entries, divisor, to, flag, [&](const auto& body) {
              launch::emulate_runs(body, {1, lanes}, launch::ThreadOrder::kStrided);
            });
            ASSERT_EQ(room, expected) << width << " " << pad << " " << skipped << " " << lanes;
          }
        }
        EXPECT_EQ(found, 0);
      }
    }
  }
}

TEST(LookUp, ReadsAndWritesVectors) {
  look_up_in_vectors<std::uint8_t, float>(DType::kUInt8, DType::kFloat32);
  look_up_in_vectors<std::uint16_t, float>(DType::kInt16, DType::kFloat32);
  look_up_in_vectors<std::uint16_t, double>(DType::kInt16, DType::kFloat64);
}

TEST_P(Convert, Rescales) {
  ConvertCase<std::int16_t, double> c(GetParam(), DType::kInt16, DType::kFloat64);
  std::vector<ops::ChannelMap> maps;
  for (index_t channel = 0; channel < c.shape[0]; ++channel) {
    maps.push_back({-20, 30, 0.5 * static_cast<double>(channel), 4});
  }
  const TensorView view{maps.data(), DType::kFloat64, Coords{c.shape[0], 4}, Coords{4, 1}, {}};
  c.expect([](index_t channel, std::int16_t value) {
    const double clipped = std::clamp<double>(value, -20, 30);
    return (clipped - 0.5 * static_cast<double>(channel)) / 4 / 3;
  });
  c.check([&] { cpu::rescale(c.from, view, false, 3, c.to, c.found_view()); },
          [&](const auto& run) {
            ops::rescale_body(c.from, view, false, 3, c.to, c.found_view(), run);
          });
}

INSTANTIATE_TEST_SUITE_P(Random, Convert, ::testing::Range(0u, 20u));

TEST(Log1p, IsWithinAUnitInTheLastPlace) {
  const double top = std::log2(std::numeric_limits<float>::max());
  for (double power = -140; power < top; power += 0.037) {
    for (const double sign : {1.0, -1.0}) {
      const auto x = static_cast<float>(sign * std::exp2(power));
      if (x <= -1) continue;
      const auto exact = static_cast<float>(std::log1p(static_cast<double>(x)));
      const float found = ops::log1p_of(x);
      EXPECT_LE(std::abs(found - exact), std::abs(std::nextafter(exact, found) - exact)) << x;
    }
  }
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(ops::log1p_of(0.0f), 0.0f);
  EXPECT_EQ(ops::log1p_of(-1.0f), -kInfinity);
  EXPECT_EQ(ops::log1p_of(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(ops::log1p_of(-1.5f)));
  EXPECT_TRUE(std::isnan(ops::log1p_of(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Convert, FindsWhatIsNotFinite) {
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -3.0f}) {
    ConvertCase<float, float> c(3, DType::kFloat32, DType::kFloat32);
    ops::ChannelMap map{-1e30, 1e30, 0, 1};
    std::ranges::fill(c.stored, 1.0f);
    c.stored.back() = value;
    map.upper = std::numeric_limits<double>::infinity();
    std::vector<ops::ChannelMap> maps(static_cast<std::size_t>(c.shape[0]), map);
    const TensorView view{maps.data(), DType::kFloat64, Coords{c.shape[0], 4}, Coords{4, 1}, {}};
    ops::rescale_body(c.from, view, true, 1, c.to, c.found_view(), [&](const auto& body) {
      launch::emulate_runs(body, launch::run_grid(body.rows(), 8), launch::ThreadOrder::kReverse);
    });
    EXPECT_EQ(c.found, 1);
  }
}

}  // namespace
}  // namespace pydist
