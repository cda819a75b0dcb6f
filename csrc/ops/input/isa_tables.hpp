// The inner loop from stored floats to inputs, with a table per instruction set.
//
// Compiled for every instruction set: it must not contain inline functions (isa/tables.hpp).
#pragma once

#include <cstdint>

#include "isa/tables.hpp"

namespace pydist::cpu {

// to[j * to_step] = rescaled(from[j * step]), j < count; see rescaled.hpp.
struct RescaleLine {
  const float* from;
  std::int64_t step;
  float* to;
  std::int64_t to_step, count;
  double lower, upper, shift, scale;
  float divisor;
  bool log;
  std::uint32_t* bad;  // becomes 1 if a result is not finite
};

// Converts stored values to inputs.
struct ConvertTable {
  void (*rescale_f32)(const RescaleLine&);
};

PYDIST_ISA_TABLE(ConvertTable, kConvert)  // isa_rescale.cpp

}  // namespace pydist::cpu
