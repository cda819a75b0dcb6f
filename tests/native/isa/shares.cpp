// An error in an isa_*.cpp: its loop calls an inline function that is compiled as a separate copy.
__attribute__((noinline)) inline double shared_by_all(double value) { return value * 3; }

namespace pydist::cpu::x86_64_v4 {

extern double (*const kLoop)(double);
double (*const kLoop)(double) = [](double value) { return shared_by_all(value) + 1; };

}  // namespace pydist::cpu::x86_64_v4
