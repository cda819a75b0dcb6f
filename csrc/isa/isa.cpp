// The choice of an instruction set, once per process.
#include "isa/isa.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>

#include "core/errors.hpp"

namespace pydist::isa {
namespace {

constexpr const char* kNames[] = {"base", "x86_64_v3", "x86_64_v4"};

#ifdef PYDIST_SIMD
// The highest level that PYDIST_ISA allows.
int highest_wanted() {
  const char* const given = std::getenv("PYDIST_ISA");
  if (given == nullptr) return static_cast<int>(std::size(kNames)) - 1;
  std::string name = given;
  std::replace(name.begin(), name.end(), '-', '_');
  const auto found = std::find(std::begin(kNames), std::end(kNames), name);
  PYDIST_EXPECT(found != std::end(kNames), "PYDIST_ISA=" + std::string(given) +
                                               ": possible are base, x86_64_v3 and x86_64_v4");
  return static_cast<int>(found - std::begin(kNames));
}

int choose() {
  const int wanted = highest_wanted();
  if (wanted >= 2 && __builtin_cpu_supports("x86-64-v4")) return 2;
  if (wanted >= 1 && __builtin_cpu_supports("x86-64-v3")) return 1;
  return 0;
}
#else
int choose() { return 0; }  // one table of each family is built
#endif

}  // namespace

int level() {
  static const int chosen = choose();
  return chosen;
}

const char* name() { return kNames[level()]; }

}  // namespace pydist::isa
