// Sums of wgrad along a row, for one instruction set; see isa/tables.hpp.
#include <cstdint>
#include <utility>

#include "isa/vectors.hpp"
#include "ops/conv/isa_tables.hpp"

namespace pydist::cpu::PYDIST_ISA_NAME {
namespace {

// kRuns * kInputs vectors of sums stay in registers during the loop over positions: one load per
// position, and one broadcast per multiply-add. Loops over the sums are unrolled: otherwise the
// sums would go through memory.
template <class T, int kRuns, int kInputs>
void add_products(const WgradRow<T>& row) {
  using Vector = typename VectorOf<T>::type;
  constexpr int kSums = kRuns * kInputs;
  Vector sums[kSums] = {};
  const T* in = row.in;
  const T* grad = row.grad;
  for (std::int64_t j = 0; j < row.count; ++j, in += row.in_step, grad += row.grad_step) {
    const Vector outputs = load(grad);
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) {
      sums[i] += (in[i / kInputs * row.in_run + i % kInputs] - Vector{}) * outputs;
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) {
    T* const to = row.sums + i / kInputs * row.sum_run + i % kInputs * row.sum_step;
    *reinterpret_cast<Vector*>(to) += sums[i];
  }
}

// As many sums as fit into the registers, besides the outputs and a broadcast.
constexpr int kMostInputs = PYDIST_VECTOR_BYTES == 64 ? kMaxWgradInputs : 12;

template <class T, int... kOne, int... kThree>
constexpr WgradIsa<T> wgrad_isa(std::integer_sequence<int, kOne...>,
                                std::integer_sequence<int, kThree...>) {
  return {VectorOf<T>::kLanes,
          kMostInputs,
          {&add_products<T, 1, kOne + 1>...},
          {&add_products<T, 3, kThree + 1>...}};
}

template <class T>
constexpr WgradIsa<T> wgrad_isa() {
  return wgrad_isa<T>(std::make_integer_sequence<int, kMostInputs>(),
                      std::make_integer_sequence<int, kMostInputs / 3>());
}

}  // namespace

const WgradTable kWgrad = {wgrad_isa<float>(), wgrad_isa<double>()};

}  // namespace pydist::cpu::PYDIST_ISA_NAME
