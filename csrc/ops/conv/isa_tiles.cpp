// Tiles of products for one instruction set: outer ones for planes, inner ones for wgrad; see
// isa/tables.hpp. Everything here must stay inside the namespace of the instruction set.
#include <cstdint>

#include "isa/vectors.hpp"
#include "ops/conv/isa_tables.hpp"

namespace pydist::cpu::PYDIST_ISA_NAME {
namespace {

// Outer products: kRows x kVectors accumulators stay in registers during the loop over channels and
// taps, with one load per vector and one broadcast per row for kRows * kVectors multiply-adds.
template <class T, int kRows, int kVectors>
void conv_tile(const ConvTile<T>& tile) {
  using Vector = typename VectorOf<T>::type;
  constexpr int kLanes = VectorOf<T>::kLanes;
  Vector sums[kRows][kVectors] = {};
  for (std::int64_t c = 0; c < tile.channels; ++c) {
    const T* const src = tile.src + c * tile.src_channel;
    const T* const weight = tile.weight + c * tile.weight_channel;
    for (std::int64_t t = 0; t < tile.taps; ++t) {
      const T* const x = src + tile.source_offset[t];
      const T* const w = weight + tile.weight_offset[t];
      Vector values[kVectors];
      for (int v = 0; v < kVectors; ++v) values[v] = load(x + v * kLanes);
      for (int m = 0; m < kRows; ++m) {
        const Vector factor = w[m * tile.weight_row] - Vector{};
        for (int v = 0; v < kVectors; ++v) sums[m][v] += factor * values[v];
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kVectors; ++v) {
      *reinterpret_cast<Vector*>(tile.sums + (m * kVectors + v) * kLanes) = sums[m][v];
    }
  }
}

// Inner products, with a vector of partial sums each; lanes are added in pairs at the end, in one
// order.
template <class T, int kRows, int kColumns>
void dot_tile(const DotTile<T>& tile) {
  using Vector = typename VectorOf<T>::type;
  constexpr int kLanes = VectorOf<T>::kLanes;
  Vector sums[kRows][kColumns] = {};
  const T* right[kColumns];
  for (int j = 0; j < kColumns; ++j) right[j] = tile.right[j];
  for (std::int64_t x = 0; x < tile.vectors * kLanes; x += kLanes) {
    Vector left[kRows];
    for (int m = 0; m < kRows; ++m) left[m] = load(tile.left + m * tile.left_row + x);
    for (int j = 0; j < kColumns; ++j) {
      const Vector value = load(right[j] + x);
      for (int m = 0; m < kRows; ++m) sums[m][j] += left[m] * value;
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int j = 0; j < kColumns; ++j) {
      T lanes[kLanes];
      *reinterpret_cast<Vector*>(lanes) = sums[m][j];
      for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
      }
      tile.sums[m * kColumns + j] = lanes[0];
    }
  }
}

// Tiles fill the register file: 24 accumulators of 32, 12 of 16, fewer without multiply-add, where
// products need registers too.
#if defined(__x86_64__) && !defined(__FMA__)
constexpr int kConvVectors = 2;
#else
constexpr int kConvVectors = 3;
#endif
constexpr int kDotRows = 4;
constexpr int kDotColumns = PYDIST_VECTOR_BYTES == 64 ? 6 : 3;

template <class T, int kRows>
constexpr void add_dot_row(ConvIsa<T>& isa) {
  isa.dot[kRows - 1][0] = &dot_tile<T, kRows, 1>;
  isa.dot[kRows - 1][1] = &dot_tile<T, kRows, 2>;
  isa.dot[kRows - 1][2] = &dot_tile<T, kRows, 3>;
  if constexpr (kDotColumns > 3) {
    isa.dot[kRows - 1][3] = &dot_tile<T, kRows, 4>;
    isa.dot[kRows - 1][4] = &dot_tile<T, kRows, 5>;
    isa.dot[kRows - 1][5] = &dot_tile<T, kRows, 6>;
  }
}

template <class T, int kLogRows>
constexpr void add_conv_row(ConvIsa<T>& isa) {
  isa.conv[kLogRows][0] = &conv_tile<T, 1 << kLogRows, 1>;
  isa.conv[kLogRows][1] = &conv_tile<T, 1 << kLogRows, 2>;
  isa.conv[kLogRows][2] = &conv_tile<T, 1 << kLogRows, 3>;
}

template <class T>
constexpr ConvIsa<T> conv_isa() {
  ConvIsa<T> isa{VectorOf<T>::kLanes, kConvVectors, kDotRows, kDotColumns, {}, {}};
  add_conv_row<T, 0>(isa);
  add_conv_row<T, 1>(isa);
  add_conv_row<T, 2>(isa);
  if constexpr (PYDIST_VECTOR_BYTES == 64) add_conv_row<T, 3>(isa);
  add_dot_row<T, 1>(isa);
  add_dot_row<T, 2>(isa);
  add_dot_row<T, 3>(isa);
  add_dot_row<T, 4>(isa);
  return isa;
}

}  // namespace

const ConvTable kConv = {conv_isa<float>(), conv_isa<double>()};

}  // namespace pydist::cpu::PYDIST_ISA_NAME
