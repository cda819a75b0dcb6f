// Arrays of pooling tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "random_cases.hpp"

namespace pydist::testing {

// An array in memory of exactly its size.
template <class T>
struct Array {
  std::vector<T> memory;
  TensorView view;

  Array(Random& random, const Coords& shape, const Coords& strides)
      : memory(static_cast<std::size_t>(volume_of(shape))) {
    for (T& value : memory) value = static_cast<T>(random.value());
    view = {memory.data(), dtype(), shape, strides, {}};
  }
  Array(const Array& other) : memory(other.memory), view(other.view) { view.data = memory.data(); }
  Array& operator=(const Array&) = delete;

  static constexpr DType dtype() {
    if constexpr (std::is_same_v<T, double>) return DType::kFloat64;
    if constexpr (std::is_same_v<T, std::int32_t>) return DType::kInt32;
    if constexpr (std::is_same_v<T, std::uint8_t>) return DType::kUInt8;
  }

  T& at(const Coords& index) {
    return memory[static_cast<std::size_t>(offset_of(index, view.strides))];
  }
};

// C order, channels last, or any order.
inline Coords some_strides(Random& random, const Coords& shape) {
  const index_t kind = random.between(0, 2);
  if (kind == 2) return random.strides_for(shape);
  const Coords order = kind == 0 ? Coords{4, 3, 2, 1, 0} : Coords{1, 4, 3, 2, 0};
  Coords strides(5);
  index_t stride = 1;
  for (const index_t dim : order) {
    strides[static_cast<int>(dim)] = stride;
    stride *= std::max<index_t>(shape[static_cast<int>(dim)], 1);
  }
  return strides;
}

}  // namespace pydist::testing
