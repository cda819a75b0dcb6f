// Stored values to inputs on the CPU: the shared bodies; floats with a loop per instruction set.
#include "launch/cpu.hpp"

#include <cstdint>
#include <type_traits>

#include "isa/isa.hpp"
#include "ops/input/body_of_views.hpp"
#include "ops/input/isa_tables.hpp"
#include "ops/input/kernels.hpp"

namespace pydist::cpu {
namespace {

// Both are bound by arithmetic or look-ups, not memory: an element costs as much as moving so many
// bytes.
constexpr index_t kBytesWorth = 16;

// Rescale of floats, with the loop along a run from the table of the instruction set in use.
struct IsaRescale : ops::Rescale<float, float> {
  template <class Loop>
  void each(const ops::ConvertRun& run, const Loop&) const {
    const ops::ChannelMap& map = maps[run.channel];
    std::uint32_t bad = 0;
    const ConvertTable& table = isa::chosen(PYDIST_ISA_TABLES(kConvert));
    table.rescale_f32({from + run.from, grid.from_stride[3], to + run.to, grid.to_stride[3],
                       grid.extent[3], map.lower, map.upper, map.shift, map.scale, divisor, log,
                       &bad});
    ops::report(found, bad);
  }
};

template <class Body>
auto vectorized(const Body& body) {
  if constexpr (std::is_same_v<Body, ops::Rescale<float, float>>) {
    return IsaRescale{body};
  } else {
    return body;
  }
}

auto on_cpu(const TensorView& out) {
  return [bytes = out.elements() * kBytesWorth](const auto& body) {
    launch::run_on_cpu(vectorized(body), bytes);
  };
}

}  // namespace

void look_up(const TensorView& stored, const TensorView& table, double divisor,
             const TensorView& out, const TensorView& found) {
  ops::look_up_body(stored, table, divisor, out, found, on_cpu(out));
}

void rescale(const TensorView& stored, const TensorView& maps, bool log, double divisor,
             const TensorView& out, const TensorView& found) {
  ops::rescale_body(stored, maps, log, divisor, out, found, on_cpu(out));
}

}  // namespace pydist::cpu
