// ReLU, leaky ReLU and PReLU for scalars and vectors, which kernels fuse with other work.
//
// `V` is a scalar or a vector of GCC's extension: comparisons of vectors give masks, and `? :`
// selects by lane, so one expression serves both.
#pragma once

#include <type_traits>

#include "launch/host_device.hpp"

namespace pydist::ops {

// PReLU is a leaky ReLU whose slope is learned: each row has its own.
enum class Activation { kNone, kRelu, kLeakyRelu, kPrelu };

// The activation that multiplies negative values by `slope`.
PYDIST_HD Activation activation_of(double slope) {
  if (slope == 1) return Activation::kNone;
  return slope == 0 ? Activation::kRelu : Activation::kLeakyRelu;
}

// activated(v) = v where v > 0, else v * slope. As in torch, ReLU keeps NaN.
template <Activation kActivation, class V>
PYDIST_HD V activated(V value, [[maybe_unused]] V slope) {
  if constexpr (kActivation == Activation::kRelu) return value <= V{} ? V{} : value;
  if constexpr (kActivation == Activation::kLeakyRelu || kActivation == Activation::kPrelu) {
    return value > V{} ? value : value * slope;
  }
  return value;
}

// The gradient through activated(value): grad where value > 0, else grad * slope. As in torch, the
// gradient at 0 is that of negative values.
template <Activation kActivation, class V>
PYDIST_HD V activation_gradient([[maybe_unused]] V value, V grad, [[maybe_unused]] V slope) {
  if constexpr (kActivation == Activation::kRelu) return value <= V{} ? V{} : grad;
  if constexpr (kActivation == Activation::kLeakyRelu || kActivation == Activation::kPrelu) {
    return value > V{} ? grad : grad * slope;
  }
  return grad;
}

// The term of one value in the gradient of its slope: grad * value where value <= 0.
template <class V>
PYDIST_HD V slope_gradient(V value, V grad) {
  return value > V{} ? V{} : value * grad;
}

// Calls f(std::integral_constant<Activation, a>) with the activation of a slope.
template <class F>
void dispatch_activation(double slope, const F& f) {
  switch (activation_of(slope)) {
    case Activation::kRelu:
      return f(std::integral_constant<Activation, Activation::kRelu>{});
    case Activation::kLeakyRelu:
      return f(std::integral_constant<Activation, Activation::kLeakyRelu>{});
    default:
      return f(std::integral_constant<Activation, Activation::kNone>{});
  }
}

}  // namespace pydist::ops
