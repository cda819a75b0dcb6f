// The inner loops of norms for one instruction set; see isa/tables.hpp.
//
// One template makes all five passes: the sums of a block's columns (total, moments, grad_sums) and
// the written elements (apply, grad_input). For each tile of columns, the values of the columns are
// loaded once and stay in registers during the loop over the block's rows.
// Traffic: each pass reads x (and grad) once; sums of a block stay in registers.
#include <cstdint>

#include "isa/vectors.hpp"
#include "ops/norm/isa_tables.hpp"
#include "ops/norm/problem.hpp"

namespace pydist::cpu::PYDIST_ISA_NAME {
namespace {

using ops::Activation;

enum class Pass { kTotal, kMoments, kApply, kSums, kGradient };

// Vectors side by side: enough independent additions to hide their latency, and few enough that two
// sums and the values of the columns fit into the registers.
constexpr int kTile = PYDIST_VECTOR_BYTES == 64 ? 4 : 2;

// One pass over `rows` rows of the columns [column, column + kVectors * kLanes).
template <Pass kPass, Activation kActivation, int kVectors, int kLanes, class Storage, class T>
PYDIST_HD void tile(const NormBlock<Storage, T>& block, std::int64_t column, std::int64_t rows) {
  using Vector = typename VectorOf<T, kLanes>::type;
  constexpr bool kGrads = kPass == Pass::kSums || kPass == Pass::kGradient;
  constexpr bool kWrites = kPass == Pass::kApply || kPass == Pass::kGradient;
  constexpr bool kSums = !kWrites;
  constexpr bool kLearned = kActivation == Activation::kPrelu;
  constexpr bool kNormalizes =
      kPass == Pass::kApply || (kGrads && kActivation != Activation::kNone);
  Vector mean[kVectors] = {}, factor[kVectors] = {}, offset[kVectors] = {};
  Vector a[kVectors] = {}, b[kVectors] = {}, d[kVectors] = {};
  Vector slope[kVectors] = {};
  Vector first[kVectors] = {}, second[kVectors] = {}, third[kVectors] = {};
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t c = column + v * kLanes;
    if constexpr (kPass != Pass::kTotal) mean[v] = widen<kLanes, T>(block.mean + c);
    if constexpr (kNormalizes) {
      factor[v] = widen<kLanes, T>(block.factor + c);
      offset[v] = widen<kLanes, T>(block.offset + c);
      slope[v] = kLearned ? widen<kLanes, T>(block.slopes + c) : block.slope - Vector{};
    }
    if constexpr (kPass == Pass::kGradient) {
      a[v] = widen<kLanes, T>(block.a + c);
      b[v] = widen<kLanes, T>(block.b + c);
      d[v] = widen<kLanes, T>(block.d + c);
    }
  }
  const std::int64_t columns = block.columns;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t at = r * columns + column + v * kLanes;
      const Vector x = widen<kLanes, T>(block.x + at);
      if constexpr (kPass == Pass::kTotal) {
        first[v] += x;
        continue;
      }
      const Vector centered = x - mean[v];
      if constexpr (kPass == Pass::kMoments) {
        first[v] += centered;
        second[v] += centered * centered;
      }
      [[maybe_unused]] Vector value{};
      if constexpr (kNormalizes) value = ops::normalized(centered, factor[v], offset[v]);
      if constexpr (kPass == Pass::kApply) {
        narrow<kLanes, T>(ops::activated<kActivation>(value, slope[v]), block.out + at);
      }
      if constexpr (kGrads) {
        const Vector given = widen<kLanes, T>(block.grad + at);
        const Vector grad = ops::activation_gradient<kActivation>(value, given, slope[v]);
        if constexpr (kPass == Pass::kSums) {
          first[v] += grad;
          second[v] += grad * centered;
          if constexpr (kLearned) third[v] += ops::slope_gradient(value, given);
        } else {
          narrow<kLanes, T>(a[v] * grad + (b[v] * centered + d[v]), block.out + at);
        }
      }
    }
  }
  if constexpr (kSums) {
    for (int v = 0; v < kVectors; ++v) {
      narrow<kLanes, T>(first[v], block.first + column + v * kLanes);
      if constexpr (kPass != Pass::kTotal) {
        narrow<kLanes, T>(second[v], block.second + column + v * kLanes);
      }
      if constexpr (kLearned) narrow<kLanes, T>(third[v], block.third + column + v * kLanes);
    }
  }
}

// The columns [begin, end): tiles of kTile vectors, then single vectors, then shorter vectors, down
// to one lane.
template <Pass kPass, Activation kActivation, int kLanes, class Storage, class T>
PYDIST_HD void tiles(const NormBlock<Storage, T>& block, std::int64_t begin, std::int64_t end,
                     std::int64_t rows) {
  if constexpr (kLanes * sizeof(T) == PYDIST_VECTOR_BYTES) {
    for (; begin + kTile * kLanes <= end; begin += kTile * kLanes) {
      tile<kPass, kActivation, kTile, kLanes>(block, begin, rows);
    }
  }
  for (; begin + kLanes <= end; begin += kLanes) {
    tile<kPass, kActivation, 1, kLanes>(block, begin, rows);
  }
  if constexpr (kLanes > 1) tiles<kPass, kActivation, kLanes / 2>(block, begin, end, rows);
}

template <Pass kPass, Activation kActivation, class Storage, class T>
void run(const NormBlock<Storage, T>& given) {
  const NormBlock<Storage, T> block = given;  // a copy, which stores can't change
  constexpr int kLanes = VectorOf<T>::kLanes;
  // The first `rest` columns have one row more than the others.
  const std::int64_t rows = block.elements / block.columns, rest = block.elements % block.columns;
  if (rest > 0) tiles<kPass, kActivation, kLanes>(block, 0, rest, rows + 1);
  tiles<kPass, kActivation, kLanes>(block, rest, block.columns, rows);
}

template <class Storage, class T>
constexpr NormIsa<Storage, T> norm_isa() {
  constexpr auto kNone = Activation::kNone, kRelu = Activation::kRelu,
                 kLeaky = Activation::kLeakyRelu, kPrelu = Activation::kPrelu;
  return {VectorOf<T>::kLanes,
          kTile * VectorOf<T>::kLanes,
          &run<Pass::kTotal, kNone, Storage, T>,
          &run<Pass::kMoments, kNone, Storage, T>,
          {&run<Pass::kApply, kNone, Storage, T>, &run<Pass::kApply, kRelu, Storage, T>,
           &run<Pass::kApply, kLeaky, Storage, T>, &run<Pass::kApply, kPrelu, Storage, T>},
          {&run<Pass::kSums, kNone, Storage, T>, &run<Pass::kSums, kRelu, Storage, T>,
           &run<Pass::kSums, kLeaky, Storage, T>, &run<Pass::kSums, kPrelu, Storage, T>},
          {&run<Pass::kGradient, kNone, Storage, T>, &run<Pass::kGradient, kRelu, Storage, T>,
           &run<Pass::kGradient, kLeaky, Storage, T>, &run<Pass::kGradient, kPrelu, Storage, T>}};
}

}  // namespace

const NormTable kNorm = {norm_isa<ops::Float16, float>(), norm_isa<ops::BFloat16, float>(),
                         norm_isa<float, float>(), norm_isa<double, double>()};

}  // namespace pydist::cpu::PYDIST_ISA_NAME
