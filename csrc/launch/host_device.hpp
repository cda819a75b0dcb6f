// Macros for code that runs on the host and, where nvcc compiles it, on the device.
#pragma once

// PYDIST_HD: host and device, always inlined. Inlining is a matter of correctness, not only of
// speed: the per-ISA objects compile the same bodies for several instruction sets, and an
// out-of-line copy made for AVX-512 must not be linked where an older CPU calls it.
#if defined(__CUDACC__)
#define PYDIST_HD __host__ __device__ __forceinline__
#else
#define PYDIST_HD __attribute__((always_inline)) inline
#endif

// Before a loop: its iterations touch different elements, the compiler may vectorize.
#if defined(__clang__)
#define PYDIST_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__) && !defined(__CUDA_ARCH__)
#define PYDIST_INDEPENDENT _Pragma("GCC ivdep")
#else
#define PYDIST_INDEPENDENT
#endif

// Before a loop of few iterations: unrolled, it would take registers on a device and gain nothing.
#if defined(__CUDA_ARCH__)
#define PYDIST_ROLLED _Pragma("unroll 1")
#else
#define PYDIST_ROLLED
#endif

// Before a loop over values in registers, which can't be indexed by a variable.
#if defined(__CUDA_ARCH__)
#define PYDIST_UNROLLED _Pragma("unroll")
#else
#define PYDIST_UNROLLED
#endif

namespace pydist::launch {

// Keeps a value in registers: a compiler that knows how it was computed may compute it again with
// every use, which costs more than a register in a loop that is bound by latency.
template <class Value>
PYDIST_HD void keep([[maybe_unused]] Value& value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Value) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
#endif
}

}  // namespace pydist::launch
