// Small random test cases, equal in every run.
#pragma once

#include <random>
#include <vector>

#include "core/box.hpp"
#include "core/view.hpp"

namespace pydist::testing {

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}

  // Uniform in [lo, hi].
  index_t between(index_t lo, index_t hi) {
    return std::uniform_int_distribution<index_t>(lo, hi)(engine_);
  }
  bool chance(double probability) { return std::bernoulli_distribution(probability)(engine_); }

  // A multiple of 1/8 in [-2, 2]: sums of few products are exact.
  double value() { return static_cast<double>(between(-16, 16)) / 8; }

  Coords permutation(int ndim) {
    std::vector<index_t> order;
    for (int dim = 0; dim < ndim; ++dim) order.push_back(dim);
    std::shuffle(order.begin(), order.end(), engine_);
    Coords result(ndim);
    for (int dim = 0; dim < ndim; ++dim) result[dim] = order[static_cast<std::size_t>(dim)];
    return result;
  }

  // Strides that give `shape` some memory order, without gaps.
  Coords strides_for(const Coords& shape) {
    Coords strides(shape.ndim());
    index_t stride = 1;
    for (const index_t dim : permutation(shape.ndim())) {
      strides[static_cast<int>(dim)] = stride;
      stride *= std::max<index_t>(shape[static_cast<int>(dim)], 1);
    }
    return strides;
  }

  Box box_in(const Coords& shape) {
    Coords lo(shape.ndim()), hi(shape.ndim());
    for (int dim = 0; dim < shape.ndim(); ++dim) {
      lo[dim] = between(0, shape[dim]);
      hi[dim] = between(lo[dim], shape[dim]);
    }
    return Box(lo, hi);
  }

 private:
  std::mt19937 engine_;
};

// Calls f(index) for every index of the box, in C order.
template <class F>
void for_each_index(const Box& box, const F& f) {
  if (box.empty()) return;
  Coords index = box.lo();
  for (;;) {
    f(index);
    int dim = box.ndim() - 1;
    for (; dim >= 0; --dim) {
      if (++index[dim] < box.hi()[dim]) break;
      index[dim] = box.lo()[dim];
    }
    if (dim < 0) return;
  }
}

inline index_t offset_of(const Coords& index, const Coords& strides) {
  index_t offset = 0;
  for (int dim = 0; dim < index.ndim(); ++dim) offset += index[dim] * strides[dim];
  return offset;
}

}  // namespace pydist::testing
