// Indices, coordinates of up to eight dims, and arithmetic that refuses to overflow.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>

#include "core/errors.hpp"

namespace pydist {

// An index, an extent, a stride or an offset, counted in elements. Signed: windows begin below 0
// where there is padding, and offsets go in both directions.
using index_t = std::int64_t;

// The most dims of a tensor. A constant, so that Coords needs no allocation and can be passed to a
// device by value.
inline constexpr int kMaxDims = 8;

// Sums, differences and products of indices. They raise UsageError where a result does not fit into
// 64 bits: extents come from users, and a wrapped index would address foreign memory.
inline index_t checked_add(index_t a, index_t b) {
  index_t sum;
  PYDIST_EXPECT(!__builtin_add_overflow(a, b, &sum),
                std::to_string(a) + " + " + std::to_string(b) + " does not fit into 64 bits");
  return sum;
}

inline index_t checked_sub(index_t a, index_t b) {
  index_t difference;
  PYDIST_EXPECT(!__builtin_sub_overflow(a, b, &difference),
                std::to_string(a) + " - " + std::to_string(b) + " does not fit into 64 bits");
  return difference;
}

inline index_t checked_mul(index_t a, index_t b) {
  index_t product;
  PYDIST_EXPECT(!__builtin_mul_overflow(a, b, &product),
                std::to_string(a) + " * " + std::to_string(b) + " does not fit into 64 bits");
  return product;
}

// Quotient rounded towards minus infinity; `divisor` > 0. Unlike the operator /, which rounds
// towards 0: floor_div(-1, 2) is -1.
constexpr index_t floor_div(index_t dividend, index_t divisor) {
  return dividend / divisor - (dividend % divisor < 0 ? 1 : 0);
}

// Quotient rounded towards plus infinity; `divisor` > 0.
constexpr index_t ceil_div(index_t dividend, index_t divisor) {
  return dividend / divisor + (dividend % divisor > 0 ? 1 : 0);
}

// One index per dim: a position, a shape, an offset or strides. Dim 0 is the outermost one. Holds
// its values in place; values beyond ndim() are 0 and take no part in comparisons.
class Coords {
 public:
  Coords() = default;

  // `ndim` times the same value. Refuses numbers of dims outside of 0 to 8 with UsageError.
  explicit Coords(int ndim, index_t value = 0) : ndim_(ndim) {
    PYDIST_EXPECT(ndim >= 0 && ndim <= kMaxDims, std::to_string(ndim) + " dims given, at most " +
                                                     std::to_string(kMaxDims) + " are possible");
    std::fill_n(values_.begin(), ndim, value);
  }

  Coords(std::initializer_list<index_t> values) : Coords(static_cast<int>(values.size())) {
    std::copy(values.begin(), values.end(), values_.begin());
  }

  int ndim() const { return ndim_; }
  // 0 <= dim < ndim(): checked only in builds with PYDIST_CHECK_BOUNDS.
  index_t& operator[](int dim) { return values_[position(dim)]; }
  index_t operator[](int dim) const { return values_[position(dim)]; }
  const index_t* begin() const { return values_.data(); }
  const index_t* end() const { return values_.data() + ndim_; }

  // Coords of different numbers of dims are unequal. The order is that of the first dim that
  // differs; it is for maps, and does not say that a is below b in every dim.
  friend bool operator==(const Coords& a, const Coords& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }
  friend bool operator<(const Coords& a, const Coords& b) {
    return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  // An overrun stays inside the object, where no sanitizer sees it.
  std::size_t position(int dim) const {
#if PYDIST_CHECK_BOUNDS
    PYDIST_INVARIANT(dim >= 0 && dim < ndim_);
#endif
    return static_cast<std::size_t>(dim);
  }

  std::array<index_t, kMaxDims> values_{};
  int ndim_ = 0;
};

// As Python writes a tuple: "(2, 3, 4)", and "(2,)" for one dim.
inline std::string to_string(const Coords& coords) {
  std::string text = "(";
  for (int dim = 0; dim < coords.ndim(); ++dim) {
    if (dim > 0) text += ", ";
    text += std::to_string(coords[dim]);
  }
  return text + (coords.ndim() == 1 ? ",)" : ")");
}

// Number of elements of a shape, whose extents are not negative; 1 for a shape without dims.
// Refuses products above 64 bits, unless an extent is 0.
inline index_t volume_of(const Coords& shape) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  index_t volume = 1;
  for (const index_t extent : shape) volume = checked_mul(volume, extent);
  return volume;
}

// Mixes a value into a hash; the order of the values counts. Boost's hash_combine, with 2^64
// divided by the golden ratio. For tables of one process: hashes are never stored or sent.
inline void hash_combine(std::size_t& seed, std::size_t value) {
  seed ^= value + 0x9e3779b97f4a7c15u + (seed << 6) + (seed >> 2);
}

inline std::size_t hash_of(const Coords& coords) {
  std::size_t seed = static_cast<std::size_t>(coords.ndim());
  for (const index_t value : coords) hash_combine(seed, std::hash<index_t>{}(value));
  return seed;
}

}  // namespace pydist
