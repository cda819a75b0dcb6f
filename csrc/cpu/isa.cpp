#include "cpu/isa.hpp"

#include <cstdlib>
#include <cstring>

namespace pydist::cpu {

namespace base {
extern const Isa kIsa;
}
#ifdef PYDIST_SIMD
namespace x86_64_v3 {
extern const Isa kIsa;
}
namespace x86_64_v4 {
extern const Isa kIsa;
}
#endif

namespace {

#ifdef PYDIST_SIMD
const Isa& choose() {
  const char* const wanted = std::getenv("PYDIST_ISA");
  const auto allows = [wanted](const char* name) {
    return wanted == nullptr || std::strcmp(wanted, name) >= 0;
  };
  // The names sort as the levels do: base < x86-64-v3 < x86-64-v4.
  if (allows("x86-64-v4") && __builtin_cpu_supports("x86-64-v4")) return x86_64_v4::kIsa;
  if (allows("x86-64-v3") && __builtin_cpu_supports("x86-64-v3")) return x86_64_v3::kIsa;
  return base::kIsa;
}
#else
const Isa& choose() { return base::kIsa; }
#endif

}  // namespace

const Isa& isa() {
  static const Isa& chosen = choose();
  return chosen;
}

}  // namespace pydist::cpu
