// Boundary convolutions of small random arrays.
#pragma once

#include <vector>

#include "ops/conv/problem.hpp"
#include "random_cases.hpp"

namespace pydist::testing {

using ops::ConvAttributes;
using ops::ConvProblem;

// An array in memory of exactly its size, in some memory order.
struct Array {
  std::vector<double> memory;
  TensorView view;

  Array(Random& random, const Coords& shape) {
    memory.resize(static_cast<std::size_t>(volume_of(shape)));
    for (double& value : memory) value = random.value();
    view = {memory.data(), DType::kFloat64, shape, random.strides_for(shape), {}};
  }
  Array(const Array& other) : memory(other.memory), view(other.view) { view.data = memory.data(); }
  Array& operator=(const Array&) = delete;

  double& at(const Coords& index) {
    return memory[static_cast<std::size_t>(offset_of(index, view.strides))];
  }
};

struct ConvCase {
  Array in, weight, out;
  ConvAttributes attributes;

  ConvProblem problem() const {
    return ops::conv_problem(in.view, weight.view, out.view, attributes);
  }

  static ConvCase make(unsigned seed) {
    Random random(seed);
    Coords kernel(3), in(3), out(3), in_lo(3), out_lo(3), stride(3), padding(3), dilation(3);
    const int thin = static_cast<int>(random.between(0, 2));
    for (int dim = 0; dim < 3; ++dim) {
      kernel[dim] = random.between(1, 4);
      in[dim] = dim == thin ? random.between(0, 2) : random.between(1, 7);
      out[dim] = random.between(1, 7);
      stride[dim] = random.between(1, 3);
      padding[dim] = random.between(0, 2);
      dilation[dim] = random.between(1, 2);
      in_lo[dim] = random.between(-4, 6);
      out_lo[dim] = in_lo[dim] / stride[dim] + random.between(-1, 2);
    }
    const index_t batch = random.between(1, 2), groups = random.between(1, 2);
    const index_t ci = random.between(1, 4), co = random.chance(0.2) ? 34 : random.between(1, 9);
    return {Array(random, {batch, groups * ci, in[0], in[1], in[2]}),
            Array(random, {groups * co, ci, kernel[0], kernel[1], kernel[2]}),
            Array(random, {batch, groups * co, out[0], out[1], out[2]}),
            {in_lo, out_lo, stride, padding, dilation, groups}};
  }

  // Calls f(in, weight, out element) for every triple that takes part.
  template <class F>
  void triples(const F& f) {
    const auto& [in_lo, out_lo, stride, padding, dilation, groups] = attributes;
    const index_t co_of_group = weight.view.shape[0] / groups;
    for_each_index(Box(Coords(5), out.view.shape), [&](const Coords& o) {
      Coords first(5), last = weight.view.shape;
      first[0] = o[1];
      last[0] = o[1] + 1;
      for_each_index(Box(first, last), [&](const Coords& w) {
        Coords i{o[0], w[0] / co_of_group * weight.view.shape[1] + w[1], 0, 0, 0};
        for (int dim = 0; dim < 3; ++dim) {
          i[2 + dim] = (out_lo[dim] + o[2 + dim]) * stride[dim] - padding[dim] +
                       w[2 + dim] * dilation[dim] - in_lo[dim];
          if (i[2 + dim] < 0 || i[2 + dim] >= in.view.shape[2 + dim]) return;
        }
        f(in.at(i), weight.at(w), out.at(o));
      });
    });
  }
};

}  // namespace pydist::testing
