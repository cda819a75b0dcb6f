// Declares the tables of a family's inner loops, one per instruction set.
//
// A family's isa_tables.hpp has the signatures of its loops, and declares the table with
// PYDIST_ISA_TABLE. CMake compiles its isa_*.cpp once per instruction set, with -march and
// PYDIST_ISA_NAME set; each defines the table in the namespace of that set. Its cpu*.cpp get the
// table in use from isa::chosen(PYDIST_ISA_TABLES(name)); see isa/isa.hpp.
//
// This header and every isa_tables.hpp are compiled for all instruction sets, so they must not
// contain inline functions (see PYDIST_HD).
#pragma once

#ifdef PYDIST_SIMD
#define PYDIST_ISA_TABLE(Table, name) \
  namespace base {                    \
  extern const Table name;            \
  }                                   \
  namespace x86_64_v3 {               \
  extern const Table name;            \
  }                                   \
  namespace x86_64_v4 {               \
  extern const Table name;            \
  }
#define PYDIST_ISA_TABLES(name) base::name, x86_64_v3::name, x86_64_v4::name
#else
#define PYDIST_ISA_TABLE(Table, name) \
  namespace base {                    \
  extern const Table name;            \
  }
#define PYDIST_ISA_TABLES(name) base::name
#endif
