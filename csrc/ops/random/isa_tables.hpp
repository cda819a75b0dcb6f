// The inner loop of random numbers, with a table per instruction set.
//
// Compiled for every instruction set: it must not contain inline functions (isa/tables.hpp).
#pragma once

#include <cstdint>

#include "isa/tables.hpp"

namespace pydist::cpu {

// out[j] = uniform(counter first + j), j < count; see philox.hpp.
struct UniformTable {
  void (*f32)(float* out, std::int64_t count, std::uint64_t key, std::uint64_t first);
  void (*f64)(double* out, std::int64_t count, std::uint64_t key, std::uint64_t first);
};

PYDIST_ISA_TABLE(UniformTable, kUniform)  // isa_uniform.cpp

}  // namespace pydist::cpu
