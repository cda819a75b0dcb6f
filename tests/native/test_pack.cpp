// Packing on the CPU and in the emulated CUDA decomposition, against plain loops.
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "launch/emulate.hpp"
#include "launch/thread_pool.hpp"
#include "ops/pack/body.hpp"
#include "ops/pack/kernels.hpp"
#include "random_cases.hpp"

namespace pydist {
namespace {

using launch::ThreadOrder;
using ops::Direction;
using ops::Regions;
using testing::for_each_index;
using testing::offset_of;
using testing::Random;

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, std::uint8_t>) return DType::kUInt8;
  if constexpr (std::is_same_v<T, std::int16_t>) return DType::kInt16;
  if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
  if constexpr (std::is_same_v<T, double>) return DType::kFloat64;
}

// A view with its memory, boxes in it and a buffer. The vectors have exact sizes, so that the
// address sanitizer finds every access outside.
template <class T>
struct PackCase {
  std::vector<T> memory, buffer;
  TensorView view;
  std::vector<Box> boxes;
  index_t elements = 0;
  index_t skipped;  // elements before the buffer: misaligns it

  explicit PackCase(unsigned seed) {
    Random random(seed);
    const int ndim = static_cast<int>(random.between(1, 5));
    Coords shape(ndim);
    for (int dim = 0; dim < ndim; ++dim) shape[dim] = random.between(1, 9);
    shape[ndim - 1] = random.between(1, 70);
    view = {nullptr, dtype_of<T>(), shape, random.strides_for(shape), {}};
    for (index_t i = random.between(0, 5); i > 0; --i) boxes.push_back(random.box_in(shape));
    for (const Box& box : boxes) elements += box.volume();
    skipped = random.between(0, 3);
    memory.resize(static_cast<std::size_t>(view.elements()));
    std::iota(memory.begin(), memory.end(), T{1});
    view.data = memory.data();
    buffer.resize(static_cast<std::size_t>(skipped + elements));
  }

  TensorView buffer_view() {
    return {buffer.data() + skipped, dtype_of<T>(), Coords{elements}, Coords{1}, {}};
  }

  // Calls f(element of memory, element of buffer) for each pair, in order.
  template <class F>
  void pairs(const F& f) {
    std::size_t at = static_cast<std::size_t>(skipped);
    for (const Box& box : boxes) {
      for_each_index(box, [&](const Coords& index) {
        f(memory[static_cast<std::size_t>(offset_of(index, view.strides))], buffer[at++]);
      });
    }
  }
};

constexpr int kTable = 16;

ops::ValueTable<kTable> table_of(const ops::RunTable& runs) {
  ops::ValueTable<kTable> table{};
  table.count = static_cast<int>(runs.boxes().size());
  table.rows = runs.rows();
  std::copy(runs.boxes().begin(), runs.boxes().end(), table.data);
  return table;
}

// As on a device. Small segments, so that small cases have split runs, too.
ops::RunOptions small_segments(unsigned seed, bool fuse, const void* buffer) {
  return {.segment_bytes = index_t{64} << seed % 4, .fuse = fuse, .pieces = true, .buffer = buffer};
}

// A grid with few threads loops over the rows; one with many has idle threads.
std::vector<launch::RunGrid> grids_for(index_t rows) {
  return {{1, 32}, {2, 4}, {1, 1}, launch::run_grid(rows, 8)};
}

template <class T>
class Packing : public ::testing::Test {};
using ElementTypes = ::testing::Types<std::uint8_t, std::int16_t, float, double>;
TYPED_TEST_SUITE(Packing, ElementTypes);

TYPED_TEST(Packing, OnCpuIsTheDefinition) {
  for (unsigned seed = 0; seed < 150; ++seed) {
    PackCase<TypeParam> test(seed);
    const Regions regions(test.boxes);
    ASSERT_EQ(regions.elements(), test.elements);
    cpu::pack(test.view, regions, test.buffer_view());
    test.pairs([](TypeParam expected, TypeParam packed) { ASSERT_EQ(packed, expected); });
    PackCase<TypeParam> target(seed);
    target.buffer = test.buffer;
    std::fill(target.memory.begin(), target.memory.end(), TypeParam{});
    cpu::unpack(target.buffer_view(), regions, target.view);
    target.pairs([](TypeParam unpacked, TypeParam given) { ASSERT_EQ(unpacked, given); });
  }
}

TYPED_TEST(Packing, EmulatedWarpsPackEveryElementOnce) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    for (const ThreadOrder order : launch::kThreadOrders) {
      PackCase<TypeParam> test(seed);
      const Regions regions(test.boxes);
      const TensorView buffer = test.buffer_view();
      const ops::RunTable runs(test.view, regions, {0, test.boxes.size()},
                               small_segments(seed, true, buffer.data));
      const ops::CopyRuns<Direction::kPack, ops::ValueTable<kTable>> body{
          static_cast<char*>(test.view.data), static_cast<char*>(buffer.data), table_of(runs)};
      for (const launch::RunGrid& grid : grids_for(runs.rows())) {
        std::fill(test.buffer.begin(), test.buffer.end(), TypeParam{});
        launch::emulate_runs(body, grid, order);
        test.pairs([](TypeParam expected, TypeParam packed) { ASSERT_EQ(packed, expected); });
      }
    }
  }
}

TYPED_TEST(Packing, EmulatedWarpsAddEveryElementOnce) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    PackCase<TypeParam> test(seed);
    const Regions regions(test.boxes);
    std::vector<TypeParam> sums(test.memory.size());
    std::fill(test.memory.begin(), test.memory.end(), TypeParam{});
    std::iota(test.buffer.begin(), test.buffer.end(), TypeParam{1});
    auto added = test.buffer.begin() + test.skipped;
    for (const Box& box : test.boxes) {
      for_each_index(box, [&](const Coords& index) {
        TypeParam& sum = sums[static_cast<std::size_t>(offset_of(index, test.view.strides))];
        sum = ops::add_values(sum, *added++);
      });
    }
    const TensorView buffer = test.buffer_view();
    for (const launch::RunGrid& grid : grids_for(1)) {
      std::fill(test.memory.begin(), test.memory.end(), TypeParam{});
      for (const Regions::Group group : regions.disjoint_groups()) {
        const ops::RunTable runs(test.view, regions, group,
                                 small_segments(seed, false, buffer.data));
        const ops::AddRuns<TypeParam, ops::ValueTable<kTable>> body{
            static_cast<char*>(test.view.data), static_cast<const char*>(buffer.data),
            table_of(runs)};
        launch::emulate_runs(body, grid, ThreadOrder::kStrided);
      }
      ASSERT_EQ(test.memory, sums);
    }
    std::fill(test.memory.begin(), test.memory.end(), TypeParam{});
    cpu::unpack_add(buffer, regions, test.view);
    ASSERT_EQ(test.memory, sums);
  }
}

// Short pieces of a view, `pitch` elements apart, with other elements between them.
struct Pieces {
  index_t length, pitch, first, skipped;  // elements; `skipped` ones precede the buffer
};
constexpr Pieces kPieces[] = {
    {32, 64, 0, 0},  // aligned to 16 bytes
    {32, 64, 0, 1},  // as its buffer is not
    {32, 64, 3, 0},  // as the view is not
    {25, 40, 8, 0}, {24, 42, 0, 0}, {17, 17 * 3, 0, 0},
    {3, 32, 16, 0}, {2, 64, 0, 0},  {63, 70, 1, 3},
};

TYPED_TEST(Packing, EmulatedWarpsMoveShortPieces) {
  constexpr index_t kOuter = 3, kCount = 37;
  for (const Pieces& pieces : kPieces) {
    const Coords shape{kOuter, kCount + 5, pieces.pitch};
    const Box box({0, 4, pieces.first}, {kOuter, 4 + kCount, pieces.first + pieces.length});
    std::vector<TypeParam> memory(static_cast<std::size_t>(volume_of(shape)));
    std::vector<TypeParam> buffer(static_cast<std::size_t>(pieces.skipped + box.volume()));
    std::iota(memory.begin(), memory.end(), TypeParam{1});
    const TensorView view{
        memory.data(), dtype_of<TypeParam>(), shape, Coords{shape[1] * shape[2], shape[2], 1}, {}};
    char* const to = reinterpret_cast<char*>(buffer.data() + pieces.skipped);
    auto expected = buffer;
    auto at = expected.begin() + pieces.skipped;
    for_each_index(box, [&](const Coords& index) {
      *at++ = memory[static_cast<std::size_t>(offset_of(index, view.strides))];
    });
    for (const index_t segment : {ops::kCudaSegmentBytes, index_t{1024}}) {
      const Regions regions({box});
      const auto table = [&](bool fuse) {
        return ops::RunTable(
            view, regions, {0, 1},
            {.segment_bytes = segment, .fuse = fuse, .pieces = true, .buffer = to});
      };
      const ops::RunTable runs = table(true), sums = table(false);
      const ops::RunBox& plan = runs.boxes().front();
      EXPECT_EQ(plan.unit(), pieces.length * static_cast<index_t>(sizeof(TypeParam)));
      if (plan.words.divisor > 1) {
        EXPECT_LE(plan.segment * plan.unit(), segment);
      }
      // The host reads words at any address, a device does not.
      for (const ops::RunBox& each : {plan, sums.boxes().front()}) {
        for (const index_t bytes : {reinterpret_cast<index_t>(view.data) + each.view_offset,
                                    reinterpret_cast<index_t>(to), each.view_stride, each.unit(),
                                    each.buffer_stride, each.outer_view_stride[0]}) {
          EXPECT_EQ(bytes % each.word, 0);
        }
      }
      const ops::CopyRuns<Direction::kPack, ops::ValueTable<kTable>> pack{
          static_cast<char*>(view.data), to, table_of(runs)};
      const ops::CopyRuns<Direction::kUnpack, ops::ValueTable<kTable>> unpack{
          static_cast<char*>(view.data), to, table_of(runs)};
      const ops::AddRuns<TypeParam, ops::ValueTable<kTable>> add{static_cast<char*>(view.data), to,
                                                                 table_of(sums)};
      const std::vector<TypeParam> before = memory;
      for (const launch::RunGrid& grid : grids_for(runs.rows())) {
        std::fill(buffer.begin(), buffer.end(), TypeParam{});
        launch::emulate_runs(pack, grid, ThreadOrder::kStrided);
        ASSERT_EQ(buffer, expected);
        for_each_index(box, [&](const Coords& index) {
          memory[static_cast<std::size_t>(offset_of(index, view.strides))] = TypeParam{};
        });
        launch::emulate_runs(unpack, grid, ThreadOrder::kReverse);
        ASSERT_EQ(memory, before);
        for_each_index(box, [&](const Coords& index) {
          memory[static_cast<std::size_t>(offset_of(index, view.strides))] = TypeParam{};
        });
        launch::emulate_runs(add, grid, ThreadOrder::kStrided);
        ASSERT_EQ(memory, before);
      }
    }
  }
}

TEST(RunTable, MakesShortPiecesIntoRowsOfAnEvenLength) {
  std::vector<float> memory(4);  // only addresses are used
  const auto box_of = [&](const Coords& shape, const Coords& strides, const Box& box, bool fuse) {
    const TensorView view{memory.data(), DType::kFloat32, shape, strides, {}};
    const Regions regions({box});
    return ops::RunTable(view, regions, {0, 1},
                         {.segment_bytes = ops::cuda_segment(regions.elements() * 4),
                          .fuse = fuse,
                          .pieces = true,
                          .buffer = memory.data()})
        .boxes()
        .front();
  };
  // A W face, channels last: voxels of 128 bytes, 32 in a row.
  const Coords last{256, 256, 256, 32}, last_strides{1 << 21, 1 << 13, 32, 1};
  for (const bool fuse : {true, false}) {
    const ops::RunBox width =
        box_of(last, last_strides, Box({0, 0, 7, 0}, {256, 256, 8, 32}), fuse);
    EXPECT_EQ(width.word, 16);
    EXPECT_EQ(width.words.divisor, 8);
    EXPECT_EQ(width.segment, 32);
    EXPECT_EQ(width.outer_rows, 1);
  }
  // An H face: rows of W of 1 KB, four of them in a row, across all channels.
  const Coords first{32, 256, 256, 256}, first_strides{1 << 24, 1 << 16, 1 << 8, 1};
  const ops::RunBox height =
      box_of(first, first_strides, Box({0, 0, 9, 0}, {32, 256, 10, 256}), true);
  EXPECT_EQ(height.unit(), 1024);
  EXPECT_EQ(height.segment, 4);
  EXPECT_EQ(height.extent, 32 * 256);
  EXPECT_EQ(height.outer_rows, 1);
  // Nine pieces of 128 bytes are three rows of 3, and not two of 4 and one of 1.
  const ops::RunBox odd = box_of({9, 64}, {64, 1}, Box({0, 0}, {9, 32}), true);
  EXPECT_EQ(odd.segment, 3);
  // A small face is spread over the device.
  EXPECT_EQ(ops::cuda_segment(index_t{8} << 20), ops::kCudaSegmentBytes);
  EXPECT_EQ(ops::cuda_segment(index_t{2} << 20), 1024);
  EXPECT_EQ(ops::cuda_segment(1), ops::kCudaShortestSegment);
}

TEST(RunTable, MakesFacesOfAnArrayIntoLongRuns) {
  std::vector<float> memory(16 * 128 * 128 * 128 / 64);  // only addresses are used
  const Coords shape{1, 16, 128, 128, 128};
  const TensorView view{
      memory.data(), DType::kFloat32, shape, Coords{16 << 21, 1 << 21, 1 << 14, 128, 1}, {}};
  const auto runs_of = [&](const Box& box) {
    const Regions regions({box});
    return ops::RunTable(view, regions, {0, 1}, {.segment_bytes = index_t{1} << 40, .fuse = true});
  };
  // D: a plane per channel. H: a row each. W: one strided run; two elements wide, in words.
  EXPECT_EQ(runs_of(Box({0, 0, 0, 0, 0}, {1, 16, 1, 128, 128})).rows(), 16);
  EXPECT_EQ(runs_of(Box({0, 0, 0, 0, 0}, {1, 16, 128, 1, 128})).rows(), 16 * 128);
  EXPECT_EQ(runs_of(Box({0, 0, 0, 0, 127}, {1, 16, 128, 128, 128})).boxes().front().extent,
            16 << 14);
  const ops::RunTable wide = runs_of(Box({0, 0, 0, 0, 126}, {1, 16, 128, 128, 128}));
  EXPECT_EQ(wide.boxes().front().extent, 16 << 14);
  EXPECT_EQ(wide.boxes().front().unit(), 8);
  EXPECT_EQ(runs_of(Box(Coords(5), shape)).rows(), 1);
}

TEST(Regions, StartANewGroupWhereBoxesOverlap) {
  const Regions regions(
      {Box({0}, {4}), Box({4}, {8}), Box({3}, {5}), Box({8}, {9}), Box({0}, {9})});
  ASSERT_EQ(regions.disjoint_groups().size(), 3u);
  EXPECT_EQ(regions.disjoint_groups()[0].end, 2u);
  EXPECT_EQ(regions.disjoint_groups()[1].end, 4u);
  EXPECT_TRUE(Regions({}).disjoint_groups().empty());
  EXPECT_THROW(Regions({Box({0}, {1}), Box({0, 0}, {1, 1})}), UsageError);
  EXPECT_THROW(regions.require_inside(Coords{8}, "x"), UsageError);
}

}  // namespace
}  // namespace pydist
