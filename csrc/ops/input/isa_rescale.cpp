// Stored floats to inputs for one instruction set; see isa/tables.hpp.
#include <cstdint>

#include "launch/host_device.hpp"
#include "ops/input/isa_tables.hpp"
#include "ops/input/rescaled.hpp"

namespace pydist::cpu::PYDIST_ISA_NAME {
namespace {

// A step that is known when compiled.
struct One {
  friend PYDIST_HD std::int64_t operator*(std::int64_t j, One) { return j; }
};

template <bool kLog, bool kMoves, class Step>
PYDIST_HD void walk(const RescaleLine& line, Step step, Step to_step) {
  const ops::ChannelMap map{line.lower, line.upper, line.shift, line.scale};
  const float* const from = line.from;
  float* const to = line.to;
  const float divisor = line.divisor;
  std::uint32_t bad = 0;
  PYDIST_INDEPENDENT
  for (std::int64_t j = 0; j < line.count; ++j) {
    const auto value = ops::rescaled<float, kLog, kMoves>(from[j * step], map, divisor);
    to[j * to_step] = value;
    bad |= ops::not_finite(value);
  }
  *line.bad |= bad;
}

template <bool kLog, bool kMoves>
PYDIST_HD void by_step(const RescaleLine& line) {
  if (line.step == 1 && line.to_step == 1) return walk<kLog, kMoves>(line, One{}, One{});
  walk<kLog, kMoves>(line, line.step, line.to_step);
}

void rescale(const RescaleLine& line) {
  const bool moves = ops::ChannelMap{line.lower, line.upper, line.shift, line.scale}.moves();
  if (line.log) return moves ? by_step<true, true>(line) : by_step<true, false>(line);
  moves ? by_step<false, true>(line) : by_step<false, false>(line);
}

}  // namespace

const ConvertTable kConvert = {&rescale};

}  // namespace pydist::cpu::PYDIST_ISA_NAME
