// Reductions over ranks in host memory, element by element in rank order. Half types are combined
// in float and rounded once.
#include "comm/local/reduce.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

namespace pydist::comm {
namespace {

float bfloat16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t float_to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (value != value) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  const std::uint32_t half = 0x7fffu + ((bits >> 16) & 1u);  // ties go to even
  return static_cast<std::uint16_t>((bits + half) >> 16);
}

float float16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity and NaN
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // Scaling by 2^112 moves the exponent's bias from 15 to 127 and is exact, subnormals included.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(scaled));
}

std::uint16_t float_to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to inf
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 puts its unit, 2^-24, into the last mantissa bit; the addition rounds.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// The storage type of elements of one kind, and the type in which they are combined.
template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static Value load(Stored stored) { return stored; }
  static Stored store(Value value) { return value; }
};
struct Float16Elements {
  using Stored = std::uint16_t;
  using Value = float;
  static Value load(Stored stored) { return float16_to_float(stored); }
  static Stored store(Value value) { return float_to_float16(value); }
};
struct BFloat16Elements {
  using Stored = std::uint16_t;
  using Value = float;
  static Value load(Stored stored) { return bfloat16_to_float(stored); }
  static Stored store(Value value) { return float_to_bfloat16(value); }
};

// One step of a reduction. Integers wrap; a NaN wins over any number in max and min.
template <ReduceOp kOp, class T>
T combine(T a, T b) {
  if constexpr (kOp == ReduceOp::kSum) {
    if constexpr (std::is_integral_v<T>) {
      // In unsigned arithmetic wrapping is defined; narrow types are promoted to int first.
      using Wide = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
      return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
    } else {
      return a + b;
    }
  } else {
    const bool keep = kOp == ReduceOp::kMax ? a >= b : a <= b;
    if constexpr (std::is_floating_point_v<T>) {
      return keep || a != a ? a : b;  // if only b is NaN, `keep` is false
    } else {
      return keep ? a : b;
    }
  }
}

// A block of accumulators stays in the L1 cache during the loop over inputs.
constexpr std::size_t kBlock = 1024;

template <class Kind, ReduceOp kOp>
void reduce_kind(std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
                 std::size_t count) {
  using Stored = typename Kind::Stored;
  std::array<typename Kind::Value, kBlock> sums;
  std::array<Stored, kBlock> stored;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    const std::size_t offset = begin * sizeof(Stored);
    const std::size_t bytes = n * sizeof(Stored);
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      std::memcpy(stored.data(), inputs[rank] + offset, bytes);
      if (rank == 0) {
        for (std::size_t i = 0; i < n; ++i) sums[i] = Kind::load(stored[i]);
      } else {
        for (std::size_t i = 0; i < n; ++i) {
          sums[i] = combine<kOp>(sums[i], Kind::load(stored[i]));
        }
      }
    }
    for (std::size_t i = 0; i < n; ++i) stored[i] = Kind::store(sums[i]);
    for (std::byte* output : outputs) std::memcpy(output + offset, stored.data(), bytes);
  }
}

template <class Kind>
void reduce_op(std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
               std::size_t count, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_kind<Kind, ReduceOp::kSum>(inputs, outputs, count);
    case ReduceOp::kMax:
      return reduce_kind<Kind, ReduceOp::kMax>(inputs, outputs, count);
    case ReduceOp::kMin:
      return reduce_kind<Kind, ReduceOp::kMin>(inputs, outputs, count);
  }
}

}  // namespace

void reduce(std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
            std::size_t count, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat16:
      return reduce_op<Float16Elements>(inputs, outputs, count, op);
    case DType::kBFloat16:
      return reduce_op<BFloat16Elements>(inputs, outputs, count, op);
    case DType::kFloat32:
      return reduce_op<Plain<float>>(inputs, outputs, count, op);
    case DType::kFloat64:
      return reduce_op<Plain<double>>(inputs, outputs, count, op);
    case DType::kInt8:
      return reduce_op<Plain<std::int8_t>>(inputs, outputs, count, op);
    case DType::kInt16:
      return reduce_op<Plain<std::int16_t>>(inputs, outputs, count, op);
    case DType::kInt32:
      return reduce_op<Plain<std::int32_t>>(inputs, outputs, count, op);
    case DType::kInt64:
      return reduce_op<Plain<std::int64_t>>(inputs, outputs, count, op);
    case DType::kUInt8:
      return reduce_op<Plain<std::uint8_t>>(inputs, outputs, count, op);
    case DType::kBool:
      // 0 and 1: "any" is max, "all" is min.
      return reduce_op<Plain<std::uint8_t>>(inputs, outputs, count,
                                            op == ReduceOp::kSum ? ReduceOp::kMax : op);
  }
}

}  // namespace pydist::comm
