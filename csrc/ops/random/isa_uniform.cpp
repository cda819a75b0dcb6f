// Random numbers along a contiguous run for one instruction set; see isa/tables.hpp.
#include <cstdint>

#include "launch/host_device.hpp"
#include "ops/random/isa_tables.hpp"
#include "ops/random/philox.hpp"

namespace pydist::cpu::PYDIST_ISA_NAME {
namespace {

template <class T>
void fill_uniform(T* out, std::int64_t count, std::uint64_t key, std::uint64_t first) {
  PYDIST_INDEPENDENT
  for (std::int64_t j = 0; j < count; ++j) {
    out[j] = ops::uniform<T>(key, first + static_cast<std::uint64_t>(j));
  }
}

}  // namespace

const UniformTable kUniform = {&fill_uniform<float>, &fill_uniform<double>};

}  // namespace pydist::cpu::PYDIST_ISA_NAME
