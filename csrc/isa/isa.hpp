// The instruction set of the CPU kernels, among those for which the inner loops are compiled.
//
// It is the best one of this CPU; PYDIST_ISA=base|x86_64_v3|x86_64_v4 in the environment lowers it.
// All functions throw UsageError if PYDIST_ISA is none of these: commands and pydist.init() call
// name() before any thread of a kernel does.
#pragma once

#include "isa/tables.hpp"

namespace pydist::isa {

int level();         // 0 for base, 1 for x86_64_v3, 2 for x86_64_v4
const char* name();  // of that level

// The table of the instruction set in use: isa::chosen(PYDIST_ISA_TABLES(kConv)).
template <class Table, class... Better>
const Table& chosen(const Table& base, const Better&... better) {
  const Table* const tables[] = {&base, &better...};
  return *tables[level()];
}

}  // namespace pydist::isa
