// What an isa_*.cpp must not do: its loop calls an inline function that gets a copy of its own.
__attribute__((noinline)) inline double shared_by_all(double value) { return value * 3; }

namespace pydist::cpu::x86_64_v4 {

extern double (*const kLoop)(double);
double (*const kLoop)(double) = [](double value) { return shared_by_all(value) + 1; };

}  // namespace pydist::cpu::x86_64_v4
