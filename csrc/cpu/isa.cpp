#include "cpu/isa.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <string>

#include "core/errors.hpp"

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
// The highest level that PYDIST_ISA allows, as an index into the names.
std::size_t highest_wanted() {
  const std::array<const char*, 3> names{base::kIsa.name, x86_64_v3::kIsa.name,
                                         x86_64_v4::kIsa.name};
  const char* const given = std::getenv("PYDIST_ISA");
  if (given == nullptr) return names.size() - 1;
  std::string name = given;
  std::replace(name.begin(), name.end(), '-', '_');
  const auto found = std::find(names.begin(), names.end(), name);
  PYDIST_EXPECT(found != names.end(), "PYDIST_ISA=" + std::string(given) +
                                          ": possible are base, x86_64_v3 and x86_64_v4");
  return static_cast<std::size_t>(found - names.begin());
}

const Isa& choose() {
  const std::size_t wanted = highest_wanted();
  if (wanted >= 2 && __builtin_cpu_supports("x86-64-v4")) return x86_64_v4::kIsa;
  if (wanted >= 1 && __builtin_cpu_supports("x86-64-v3")) return x86_64_v3::kIsa;
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
