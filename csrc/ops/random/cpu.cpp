// Keyed random numbers on the CPU: the shared body, with an inner loop per instruction set.
#include "launch/cpu.hpp"

#include <type_traits>

#include "isa/isa.hpp"
#include "ops/random/body.hpp"
#include "ops/random/isa_tables.hpp"
#include "ops/random/kernels.hpp"

namespace pydist::cpu {
namespace {

// The generator is bound by arithmetic, not memory: writing a byte costs as much as moving so many.
constexpr index_t kBytesWorth = 8;

// KeyedUniform, with the loop along contiguous runs from the table of the instruction set in use.
template <class T>
struct IsaUniform : ops::KeyedUniform<T> {
  template <class Loop>
  void each(const ops::KeyedRun& run, const Loop& loop) const {
    const int last = this->box.ndim - 1;
    if (this->box.stride[last] != 1) return ops::KeyedUniform<T>::each(run, loop);
    T* const to = this->out + run.offset;
    const UniformTable& table = isa::chosen(PYDIST_ISA_TABLES(kUniform));
    if constexpr (std::is_same_v<T, float>) {
      table.f32(to, this->box.extent[last], this->box.key.read(), run.counter);
    } else {
      table.f64(to, this->box.extent[last], this->box.key.read(), run.counter);
    }
  }
};

template <class T>
void fill(const TensorView& out, const ops::KeyedBox& box) {
  const index_t elements = out.elements();
  if (elements == 0) return;
  launch::run_on_cpu(
      IsaUniform<T>{{static_cast<T*>(out.data), box, elements / box.extent[box.ndim - 1]}},
      elements * static_cast<index_t>(sizeof(T)) * kBytesWorth);
}

}  // namespace

void keyed_uniform(const TensorView& out, const ops::UniformKey& key, const Coords& lo,
                   const Coords& shape) {
  const ops::KeyedBox box = ops::keyed_box(out, key, lo, shape);
  if (out.dtype == DType::kFloat32) {
    fill<float>(out, box);
  } else {
    fill<double>(out, box);
  }
}

}  // namespace pydist::cpu
