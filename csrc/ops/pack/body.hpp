// Bodies of pack, unpack and unpack_add.
//
// Both bodies walk the rows of a run table (runs.hpp). Only AddRuns depends on the element type:
// CopyRuns moves words.
#pragma once

#include <cstdint>
#include <type_traits>

#include "launch/run_body.hpp"
#include "ops/common/half.hpp"
#include "ops/common/vector.hpp"
#include "ops/common/word.hpp"
#include "ops/pack/runs.hpp"

namespace pydist::ops {

enum class Direction { kPack, kUnpack };

// The boxes of a body: a pointer on the host; by value in the kernel's parameters on a device, so
// that nothing is allocated or copied there.
struct HostTable {
  const RunBox* data;
  int count;
  index_t rows;
  PYDIST_HD const RunBox* boxes() const { return data; }
};
template <int N>
struct ValueTable {
  RunBox data[N];
  int count;
  index_t rows;
  PYDIST_HD const RunBox* boxes() const { return data; }
};

// The address of word j of a run, on one side whose units are `stride` bytes apart. A word is a V,
// or a vector of them, and has kBytes.
//
// kPieces: units may have several words. Otherwise, as on the CPU, word j is unit j, and a loop
// over j has no division.
template <class V, int kBytes, bool kPieces, class Byte>
PYDIST_HD auto* word_at(Byte* first, index_t stride, const Divisor& words, index_t j) {
  using Value = std::conditional_t<std::is_const_v<Byte>, const V, V>;
  if constexpr (kPieces) {
    const auto at = static_cast<std::int32_t>(j);  // a row has a few KB
    const std::int32_t unit = words.quotient(at), within = at - unit * words.divisor;
    first += unit * stride + within * kBytes;
  } else {
    first += j * stride;
  }
  return reinterpret_cast<Value*>(first);
}

// Copies boxes of a view to a buffer, or back.
//
// Index formula: buffer[offset(box) + C-order index i in the box] <-> view[sum_d (lo_d + i_d)
//   stride_d], after dims have been coalesced and short pieces joined into units.
// Threads: CPU, rows over threads, each run a vectorized loop or one memcpy; CUDA, a warp (or less)
//   per run, lanes over 16-byte words if both sides have the same alignment, else over the widest
//   word for which they do; in runs of short pieces, over the widest word that fits all of them.
// Traffic: 2 bytes moved per byte packed (one read, one written); no arithmetic on elements.
// Proof: tests/kernels/test_pack.py against NumPy; tests/native/test_pack.cpp emulates the CUDA
//   decomposition.
// CPU code: this body, except for short rows on one thread (cpu.cpp).
template <Direction kDirection, class Table>
struct CopyRuns {
  static constexpr int kRunBlocks = 3;  // what is read ahead takes registers

  char* view;
  char* buffer;
  Table table;

  PYDIST_HD index_t rows() const { return table.rows; }
  PYDIST_HD Run row(index_t r) const { return find_run(table.boxes(), table.count, r); }

  template <class Loop>
  PYDIST_HD void each(const Run& run, const Loop& loop) const {
    char* to = (kDirection == Direction::kPack ? buffer + run.buffer : view + run.view);
    const char* from = (kDirection == Direction::kPack ? view + run.view : buffer + run.buffer);
    if (run.contiguous()) {
      if constexpr (launch::BulkLoop<Loop>) {
        loop.copy(to, from, run.length * run.unit());
      } else {
        contiguous(to, from, run.length * run.unit(), loop);
      }
      return;
    }
    const index_t to_stride = kDirection == Direction::kPack ? run.buffer_stride : run.view_stride;
    const index_t from_stride =
        kDirection == Direction::kPack ? run.view_stride : run.buffer_stride;
    switch (run.word) {
      case 1:
        return strided<1>(to, to_stride, from, from_stride, run, loop);
      case 2:
        return strided<2>(to, to_stride, from, from_stride, run, loop);
      case 4:
        return strided<4>(to, to_stride, from, from_stride, run, loop);
      case 8:
        return strided<8>(to, to_stride, from, from_stride, run, loop);
      default:
        return strided<16>(to, to_stride, from, from_stride, run, loop);
    }
  }

 private:
  // Chooses the widest word for which source and target have the same alignment.
  template <class Loop>
  static PYDIST_HD void contiguous(char* to, const char* from, index_t bytes, const Loop& loop) {
    const auto difference =
        reinterpret_cast<std::uintptr_t>(to) ^ reinterpret_cast<std::uintptr_t>(from);
    if (difference % 16 == 0) return words<16>(to, from, bytes, loop);
    if (difference % 8 == 0) return words<8>(to, from, bytes, loop);
    if (difference % 4 == 0) return words<4>(to, from, bytes, loop);
    if (difference % 2 == 0) return words<2>(to, from, bytes, loop);
    return words<1>(to, from, bytes, loop);
  }

  // Bytes up to the first aligned word, the words, the remaining bytes.
  template <int N, class Loop>
  static PYDIST_HD void words(char* to, const char* from, index_t bytes, const Loop& loop) {
    const index_t misaligned = static_cast<index_t>(reinterpret_cast<std::uintptr_t>(to) % N);
    index_t head = misaligned == 0 ? 0 : N - misaligned;
    if (head > bytes) head = bytes;
    const index_t middle = (bytes - head) / N;
    const index_t tail = bytes - head - middle * N;
    if (head > 0) few(to, from, head, loop);
    unit_stride<N>(to + head, from + head, middle, loop);
    if (tail > 0) few(to + bytes - tail, from + bytes - tail, tail, loop);
  }

  template <class Loop>
  static PYDIST_HD void few(char* to, const char* from, index_t bytes, const Loop& loop) {
    loop(bytes, [=](index_t j) { to[j] = from[j]; });
  }

  template <int N, class Loop>
  static PYDIST_HD void unit_stride(char* to, const char* from, index_t count, const Loop& loop) {
    auto* const target = reinterpret_cast<Word<N>*>(to);
    const auto* const source = reinterpret_cast<const Word<N>*>(from);
    loop(count, launch::Move{[=](index_t j) { return source[j]; },
                             [=](index_t j, const Word<N>& word) { target[j] = word; }});
  }

  template <int N, class Loop>
  static PYDIST_HD void strided(char* to, index_t to_stride, const char* from, index_t from_stride,
                                const Run& run, const Loop& loop) {
    constexpr bool kPieces = !launch::BulkLoop<Loop>;
    const Divisor words = run.words;
    loop(run.length * words.divisor,
         launch::Move{
             [=](index_t j) { return *word_at<Word<N>, N, kPieces>(from, from_stride, words, j); },
             [=](index_t j, const Word<N>& word) {
               *word_at<Word<N>, N, kPieces>(to, to_stride, words, j) = word;
             }});
  }
};

// a + b in the arithmetic of dtype T: fp16 and bf16 in fp32, integers wrap, bool is "or".
template <class T>
PYDIST_HD T add_values(T a, T b) {
  if constexpr (std::is_same_v<T, bool>) {
    return a || b;
  } else if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return store_as<T>(load_as(a) + load_as(b));
  }
}

template <class T, int N>
PYDIST_HD Vector<T, N> add_values(Vector<T, N> a, const Vector<T, N>& b) {
  PYDIST_UNROLLED
  for (int e = 0; e < N; ++e) a.element[e] = add_values(a.element[e], b.element[e]);
  return a;
}

// view[box] += buffer: the adjoint of pack.
//
// Index formula, threads and proof as CopyRuns; words are single elements, or 16 bytes of them in
// contiguous runs where both sides have the same alignment and in pieces that are all aligned to
// that. The boxes of one launch must be disjoint (Regions::disjoint_groups), so that no two threads
// add to one element. Traffic: 3 bytes moved per byte added (two read, one written).
template <class T, class Table>
struct AddRuns {
  static constexpr int kRunBlocks = 3;

  char* view;
  const char* buffer;
  Table table;

  PYDIST_HD index_t rows() const { return table.rows; }
  PYDIST_HD Run row(index_t r) const { return find_run(table.boxes(), table.count, r); }

  template <class Loop>
  PYDIST_HD void each(const Run& run, const Loop& loop) const {
    char* const to = view + run.view;
    const char* const from = buffer + run.buffer;
    if (run.contiguous()) {
      return contiguous(reinterpret_cast<T*>(to), reinterpret_cast<const T*>(from),
                        run.length * run.unit() / static_cast<index_t>(sizeof(T)), loop);
    }
    if constexpr (kVectors<Loop>) {
      if (run.word == kVectorBytes) return strided<kVector>(to, from, run, loop);
    }
    strided<1>(to, from, run, loop);
  }

 private:
  // On CPUs the compiler vectorizes; vectors of single bytes would need too many registers.
  template <class Loop>
  static constexpr bool kVectors = !launch::BulkLoop<Loop> && sizeof(T) > 1;
  static constexpr int kVector = kVectorElements<T>;

  // Elements up to the first aligned vector, the vectors, the remaining elements.
  template <class Loop>
  static PYDIST_HD void contiguous(T* to, const T* from, index_t count, const Loop& loop) {
    if constexpr (kVectors<Loop>) {
      const auto address = reinterpret_cast<std::uintptr_t>(to);
      const index_t beyond = static_cast<index_t>(address % kVectorBytes / sizeof(T));
      const index_t head = beyond == 0 ? 0 : kVector - beyond;
      const bool fits = (address ^ reinterpret_cast<std::uintptr_t>(from)) % kVectorBytes == 0;
      if (fits && head < count) {
        const index_t middle = (count - head) / kVector, done = head + middle * kVector;
        if (head > 0) few(to, from, head, loop);
        unit_stride<kVector>(to + head, from + head, middle, loop);
        if (done < count) few(to + done, from + done, count - done, loop);
        return;
      }
    }
    unit_stride<1>(to, from, count, loop);
  }

  template <class Loop>
  static PYDIST_HD void few(T* to, const T* from, index_t count, const Loop& loop) {
    loop(count, [=](index_t j) { to[j] = add_values(to[j], from[j]); });
  }

  template <int N>
  struct Pair {
    Vector<T, N> to, from;

    static PYDIST_HD Pair load(const T* to, const T* from) {
      return {Vector<T, N>::load(to), Vector<T, N>::load(from)};
    }
    PYDIST_HD void add(T* sum) const { add_values(to, from).store(sum); }
  };

  template <int N, class Loop>
  static PYDIST_HD void unit_stride(T* to, const T* from, index_t count, const Loop& loop) {
    loop(count, launch::Move{[=](index_t j) { return Pair<N>::load(to + j * N, from + j * N); },
                             [=](index_t j, const Pair<N>& pair) { pair.add(to + j * N); }});
  }

  template <int N, class Loop>
  static PYDIST_HD void strided(char* to, const char* from, const Run& run, const Loop& loop) {
    constexpr bool kPieces = !launch::BulkLoop<Loop>;
    constexpr int kBytes = N * static_cast<int>(sizeof(T));
    const Divisor words = run.words;
    const index_t to_stride = run.view_stride, from_stride = run.buffer_stride;
    loop(run.length * words.divisor,
         launch::Move{[=](index_t j) {
                        return Pair<N>::load(
                            word_at<T, kBytes, kPieces>(to, to_stride, words, j),
                            word_at<T, kBytes, kPieces>(from, from_stride, words, j));
                      },
                      [=](index_t j, const Pair<N>& pair) {
                        pair.add(word_at<T, kBytes, kPieces>(to, to_stride, words, j));
                      }});
  }
};

}  // namespace pydist::ops
