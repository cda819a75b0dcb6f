// Vectors of one instruction set, only for the isa_*.cpp of the families.
//
// Types are GCC's and Clang's vector extension: arithmetic, comparisons and `? :` work on them, and
// `scalar - Vector{}` is a broadcast. Everything is in an anonymous namespace inside of the
// namespace of the instruction set, and inlined: no object shares a function with another one.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "launch/host_device.hpp"
#include "ops/common/half.hpp"

// Bytes of a register of the instruction set for which this is compiled (-march).
#if defined(__AVX512F__)
#define PYDIST_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define PYDIST_VECTOR_BYTES 32
#else
#define PYDIST_VECTOR_BYTES 16
#endif

namespace pydist::cpu::PYDIST_ISA_NAME {
namespace {

// A vector of kCount elements: by default a register of them. A longer one is an array of registers
// to the compiler, a shorter one a part of a register.
template <class T, int kCount = PYDIST_VECTOR_BYTES / sizeof(T)>
struct VectorOf {
  // Unaligned loads and stores through this type are allowed.
  typedef T type __attribute__((vector_size(kCount * sizeof(T)), aligned(sizeof(T)), may_alias));
  static constexpr int kLanes = kCount;
};

// A full register of elements, from any address: the caller ensures that all of them may be read.
template <class T>
PYDIST_HD typename VectorOf<T>::type load(const T* address) {
  return *reinterpret_cast<const typename VectorOf<T>::type*>(address);
}

// Whether one instruction converts that many fp16. If not, widen and narrow convert lane by lane,
// with the scalar code of half.hpp.
template <class Storage, int kLanes>
constexpr bool has_half_vector() {
#if defined(__AVX512F__)
  return std::is_same_v<Storage, ops::Float16> && (kLanes == 16 || kLanes == 8);
#elif defined(__F16C__)
  return std::is_same_v<Storage, ops::Float16> && kLanes == 8;
#else
  return false;
#endif
}

#if defined(__AVX512F__)
// Conversions without a mask make g++ 12 warn inside its own header.
constexpr __mmask16 kAllLanes = 0xffff;
#endif

// Upper halves of floats, as ops::BFloat16 has them.
template <int kLanes>
struct BFloatVectors {
  typedef std::uint16_t Halves
      __attribute__((vector_size(2 * kLanes), aligned(sizeof(std::uint16_t)), may_alias));
  typedef std::uint32_t Words __attribute__((vector_size(4 * kLanes)));
};

// Loads kLanes elements, from any address, and converts them to the accumulator type T. The
// conversion is exact, so all branches give the same values: with an instruction of F16C or AVX-512
// where there is one, else by arithmetic on the bits (bfloat16) or lane by lane.
template <int kLanes, class T, class Storage>
PYDIST_HD typename VectorOf<T, kLanes>::type widen(const Storage* address) {
  using Vector = typename VectorOf<T, kLanes>::type;
  if constexpr (std::is_same_v<T, Storage>) {
    return *reinterpret_cast<const Vector*>(address);
#if defined(__AVX512F__)
  } else if constexpr (has_half_vector<Storage, kLanes>() && kLanes == 16) {
    const auto halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address));
    return reinterpret_cast<Vector>(_mm512_maskz_cvtph_ps(kAllLanes, halves));
#endif
#if defined(__F16C__)
  } else if constexpr (has_half_vector<Storage, kLanes>()) {
    const auto halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(address));
    return reinterpret_cast<Vector>(_mm256_cvtph_ps(halves));
#endif
  } else if constexpr (std::is_same_v<Storage, ops::BFloat16>) {
    using Bits = BFloatVectors<kLanes>;
    const auto halves = *reinterpret_cast<const typename Bits::Halves*>(address);
    return reinterpret_cast<Vector>(__builtin_convertvector(halves, typename Bits::Words) << 16);
  } else {
    Vector values;
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = ops::load_as(address[lane]);
    return values;
  }
}

// Rounds kLanes values as store_as of half.hpp does (a NaN may get other bits), and stores them.
template <int kLanes, class T, class Storage>
PYDIST_HD void narrow(typename VectorOf<T, kLanes>::type values, Storage* address) {
  if constexpr (std::is_same_v<T, Storage>) {
    *reinterpret_cast<typename VectorOf<T, kLanes>::type*>(address) = values;
#if defined(__AVX512F__)
  } else if constexpr (has_half_vector<Storage, kLanes>() && kLanes == 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(address),
                        _mm512_maskz_cvtps_ph(kAllLanes, reinterpret_cast<__m512>(values),
                                              _MM_FROUND_TO_NEAREST_INT));
#endif
#if defined(__F16C__)
  } else if constexpr (has_half_vector<Storage, kLanes>()) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(address),
                     _mm256_cvtps_ph(reinterpret_cast<__m256>(values), _MM_FROUND_TO_NEAREST_INT));
#endif
  } else if constexpr (std::is_same_v<Storage, ops::BFloat16>) {
    using Bits = BFloatVectors<kLanes>;
    const auto words = reinterpret_cast<typename Bits::Words>(values);
    const auto rounded = (words + 0x7fffu + ((words >> 16) & 1u)) >> 16;
    const typename Bits::Words quiet = 0x7fc0u - typename Bits::Words{};
    const auto halves = (words & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
    *reinterpret_cast<typename Bits::Halves*>(address) =
        __builtin_convertvector(halves, typename Bits::Halves);
  } else {
    for (int lane = 0; lane < kLanes; ++lane) {
      address[lane] = ops::store_as<Storage>(T{values[lane]});
    }
  }
}

// Stores past the caches; the address is aligned to a vector. _mm_sfence() makes such stores
// visible to other threads. For targets that are larger than the caches and not read soon: a store
// through the caches would first read the line from memory.
template <class T>
PYDIST_HD void stream(typename VectorOf<T>::type values, T* address) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(address), reinterpret_cast<__m512i>(values));
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(address), reinterpret_cast<__m256i>(values));
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(address), reinterpret_cast<__m128i>(values));
#else
  *reinterpret_cast<typename VectorOf<T>::type*>(address) = values;
#endif
}

}  // namespace
}  // namespace pydist::cpu::PYDIST_ISA_NAME
