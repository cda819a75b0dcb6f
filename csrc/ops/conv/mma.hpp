// Products of the tensor cores: the fragments of the lanes of a warp, and their product.
//
// D += A B with A [16, k] in rows, B [k, 8] in columns and D in fp32; k is eight words of 32 bits:
// 16 elements of 16 bits or 8 of tf32. On a device this is one instruction (mma.sync of sm_80 and
// later). In emulation all lanes' fragments are assembled into A and B in the layout of the PTX
// manual (section "Matrix Fragments for mma"), element by element, and multiplied: a kernel that
// loads its fragments in another way gets a wrong result there too.
//
// With group = lane / 4 and q = lane % 4, in words along k (two elements of 16 bits, or a tf32):
//   A  words[0..3] = A[group][q], A[group + 8][q], A[group][q + 4], A[group + 8][q + 4]
//   B  words[0..1] = B[q][group], B[q + 4][group]
//   D  values[0..3] = D[group][2q], D[group][2q + 1], D[group + 8][2q], D[group + 8][2q + 1]
//
// Threads: a warp makes one product. 32 lanes x 4 words hold A, 32 x 2 hold B, and 32 x 4 values
// hold
//   D: each element of D has one place, so each sum is written by one lane.
// Traffic: registers only; 16 x 8 x k multiply-adds for (16 + 8) x 8 words that the warp has
// loaded. Proof: tests/native/test_conv_mma.cpp on the emulation, tests/gpu/test_conv_gpu.py on a
// device.
#pragma once

#include <cstdint>

#include "launch/decomposition.hpp"
#include "ops/common/half.hpp"

namespace pydist::ops {

enum class MmaFormat { kFloat16, kBFloat16, kTf32 };

inline constexpr int kMmaRows = 16, kMmaColumns = 8;
inline constexpr int kMmaWords = 8;  // of k

// One lane's fragments of A, B and D.
struct LeftFragment {
  std::uint32_t words[4];
};
struct RightFragment {
  std::uint32_t words[2];
};
struct ProductFragment {
  float values[4];
};

// The nearest number with 10 bits of mantissa (ties away from zero), as for tf32.
PYDIST_HD std::uint32_t to_tf32(std::uint32_t word) {
#if defined(__CUDA_ARCH__)
  std::uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(word)));
  return rounded;
#else
  const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
  return is_nan ? 0x7fffe000u : (word + 0x1000u) & ~0x1fffu;
#endif
}

// A float as a tf32 (its upper 10 bits of mantissa, cut off) and the rest, rounded to tf32: their
// sum has 21 bits of mantissa or more. The subtraction is exact.
//
// An infinity is 1, of its sign, and an infinite rest, and NaN has a rest of NaN. The rest is
// multiplied only by the other factor's high part, which is not 0 where the factor is not, except
// for denormal numbers: an infinite high part would make NaN of a low part that is 0.
struct SplitFloat {
  std::uint32_t high, low;
};
PYDIST_HD SplitFloat split_float(std::uint32_t word) {
  const bool is_infinite = (word & 0x7fffffffu) == 0x7f800000u;
  const std::uint32_t high = word & (is_infinite ? 0xbf800000u : ~0x1fffu);
  return {high, to_tf32(bits_as<std::uint32_t>(bits_as<float>(word) - bits_as<float>(high)))};
}

#if defined(__CUDA_ARCH__)

template <MmaFormat kFormat>
__device__ __forceinline__ void multiply_lane(const LeftFragment& a, const RightFragment& b,
                                              ProductFragment& d) {
#define PYDIST_MMA(instruction)                                                             \
  asm volatile("mma.sync.aligned." instruction                                              \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
               : "+f"(d.values[0]), "+f"(d.values[1]), "+f"(d.values[2]), "+f"(d.values[3]) \
               : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]),        \
                 "r"(b.words[0]), "r"(b.words[1]))
  if constexpr (kFormat == MmaFormat::kFloat16) PYDIST_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  if constexpr (kFormat == MmaFormat::kBFloat16) PYDIST_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  if constexpr (kFormat == MmaFormat::kTf32) PYDIST_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
#undef PYDIST_MMA
}

#else

// A and B as matrices, assembled from the lanes' fragments.
template <MmaFormat kFormat>
struct EmulatedMma {
  static constexpr bool kNarrow = kFormat != MmaFormat::kTf32;
  static constexpr int kDepth = kNarrow ? 16 : 8;

  double a[kMmaRows][kDepth], b[kDepth][kMmaColumns];

  // Element i of a fragment: the lower half of a word comes first.
  static double element(const std::uint32_t* words, int i) {
    if constexpr (kNarrow) {
      const auto bits = static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2)));
      if constexpr (kFormat == MmaFormat::kFloat16) return Float16{bits}.to_float();
      return BFloat16{bits}.to_float();
    } else {
      return bits_as<float>(words[i] & ~0x1fffu);  // the instruction ignores the rest
    }
  }

  void set(int lane, const LeftFragment& left, const RightFragment& right) {
    const int group = lane >> 2, in_group = lane % 4;
    if constexpr (kNarrow) {
      for (int i = 0; i < 8; ++i) {
        const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
        a[row][in_group * 2 + (i & 1) + (i < 4 ? 0 : 8)] = element(left.words, i);
      }
      for (int i = 0; i < 4; ++i) {
        b[in_group * 2 + (i & 1) + (i < 2 ? 0 : 8)][group] = element(right.words, i);
      }
    } else {
      for (int i = 0; i < 4; ++i) {
        const int row = i == 0 || i == 2 ? group : group + 8;
        a[row][i < 2 ? in_group : in_group + 4] = element(left.words, i);
      }
      for (int i = 0; i < 2; ++i) b[in_group + 4 * i][group] = element(right.words, i);
    }
  }

  void add_to(int lane, ProductFragment& d) const {
    for (int i = 0; i < 4; ++i) {
      const int row = i < 2 ? lane >> 2 : (lane >> 2) + 8, column = lane % 4 * 2 + (i & 1);
      double sum = d.values[i];
      for (int k = 0; k < kDepth; ++k) sum += a[row][k] * b[k][column];
      d.values[i] = static_cast<float>(sum);
    }
  }
};

#endif

// The product of one warp. `left`, `right` and `product` find the fragments in a lane's state.
template <MmaFormat kFormat, class Thread, class Left, class Right, class Product>
PYDIST_HD void multiply_warp(const launch::Warp<Thread>& warp, const Left& left, const Right& right,
                             const Product& product) {
#if defined(__CUDA_ARCH__)
  Thread& own = *warp.lanes;
  multiply_lane<kFormat>(left(own), right(own), product(own));
#else
  EmulatedMma<kFormat> matrices;
  for (int lane = 0; lane < launch::kWarp; ++lane) {
    matrices.set(lane, left(warp.lanes[lane]), right(warp.lanes[lane]));
  }
  for (int lane = 0; lane < launch::kWarp; ++lane) {
    matrices.add_to(lane, product(warp.lanes[lane]));
  }
#endif
}

}  // namespace pydist::ops
