// How GoogleTest shows geometry in names and failures.
#pragma once

#include <ostream>

#include "core/plan.hpp"

namespace pydist {

inline void PrintTo(const Coords& coords, std::ostream* out) { *out << to_string(coords); }
inline void PrintTo(const Box& box, std::ostream* out) { *out << to_string(box); }
inline void PrintTo(const Transfer& transfer, std::ostream* out) {
  *out << to_string(transfer.box) << " slot " << transfer.slot;
}

}  // namespace pydist
