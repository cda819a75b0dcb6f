// Arrays of pooling tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "ops/common/half.hpp"
#include "random_cases.hpp"

namespace pydist::testing {

// An array in memory of exactly its size. It may begin after some elements: a slice of a tensor is
// aligned to an element, and not to a vector.
template <class T>
struct Array {
  index_t begin;  // elements
  std::vector<T> memory;
  TensorView view;

  Array(Random& random, const Coords& shape, const Coords& strides, index_t begin = 0)
      : begin(begin), memory(static_cast<std::size_t>(begin + volume_of(shape))) {
    for (T& value : memory) value = static_cast<T>(random.value());
    set_view(shape, strides);
  }
  Array(const Array& other) : begin(other.begin), memory(other.memory) {
    set_view(other.view.shape, other.view.strides);
  }
  // The values of `other`, rounded to T.
  explicit Array(const Array<double>& other)
    requires(!std::is_same_v<T, double>)
      : begin(other.begin) {
    for (const double value : other.memory) {
      memory.push_back(ops::store_as<T>(static_cast<ops::accumulator_t<T>>(value)));
    }
    set_view(other.view.shape, other.view.strides);
  }
  Array& operator=(const Array&) = delete;

  static constexpr DType dtype() {
    if constexpr (std::is_same_v<T, double>) return DType::kFloat64;
    if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
    if constexpr (std::is_same_v<T, ops::BFloat16>) return DType::kBFloat16;
    if constexpr (std::is_same_v<T, ops::Float16>) return DType::kFloat16;
    if constexpr (std::is_same_v<T, std::int32_t>) return DType::kInt32;
    if constexpr (std::is_same_v<T, std::uint8_t>) return DType::kUInt8;
  }

  T& at(const Coords& index) {
    return memory[static_cast<std::size_t>(begin + offset_of(index, view.strides))];
  }
  void fill(T value) { std::fill(memory.begin() + begin, memory.end(), value); }

  // The memory as numbers that can be compared: NaN equals NaN.
  std::vector<double> numbers() const {
    std::vector<double> all;
    for (const T& value : memory) {
      const auto number = static_cast<double>(ops::load_as(value));
      all.push_back(std::isnan(number) ? 12345 : number);
    }
    return all;
  }

 private:
  void set_view(const Coords& shape, const Coords& strides) {
    view = {memory.data() + begin, dtype(), shape, strides, {}};
  }
};

inline Coords strides_in(const Coords& order, const Coords& shape) {
  Coords strides(5);
  index_t stride = 1;
  for (const index_t dim : order) {
    strides[static_cast<int>(dim)] = stride;
    stride *= std::max<index_t>(shape[static_cast<int>(dim)], 1);
  }
  return strides;
}

// How the arrays of a case are stored. Vectors of channels need channels-last arrays, a suitable
// number of channels and aligned memory; half of the cases have them.
class Storing {
 public:
  explicit Storing(Random& random)
      : random_(random), vectors_(random.chance(0.5)), aligned_(random.chance(0.8)) {}

  index_t channels() {
    if (vectors_) return random_.chance(0.8) ? 8 * random_.between(1, 3) : 12;
    return random_.chance(0.3) ? 1 : random_.between(2, 21);
  }
  template <class T>
  Array<T> array(const Coords& shape) {
    return Array<T>(random_, shape, strides(shape), aligned_ ? 0 : random_.between(0, 1));
  }

 private:
  // C order, channels last, or any order.
  Coords strides(const Coords& shape) {
    const index_t kind = vectors_ ? 1 : random_.between(0, 2);
    if (kind == 2) return random_.strides_for(shape);
    return strides_in(kind == 0 ? Coords{4, 3, 2, 1, 0} : Coords{1, 4, 3, 2, 0}, shape);
  }

  Random& random_;
  bool vectors_, aligned_;
};

}  // namespace pydist::testing
