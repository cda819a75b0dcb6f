// Loads the operands of a boundary convolution on tensor cores into shared memory.
//
//            left (rows of a stage)                         right (columns of a stage)
//   forward  gather_place: a thread, one row                weights
//   dgrad    gather_place                                   weights
//   wgrad    gather_pairs: 16 threads, one row              gradient
//
// All fill rows along k. Elements outside of an array, or beyond the extents, become 0, so that
// products need no checks. Reads are 16 bytes wide if the layout allows (channels-last).
#pragma once

#include <cstdint>

#include "ops/common/half.hpp"
#include "ops/common/word.hpp"
#include "ops/conv/gather.hpp"

namespace pydist::ops {

inline constexpr int kTileWords = 16;  // of k, in one step

// One row of a tile, along k. Four words are padding: with rows 20 words apart, neither eight rows
// of four words (a fragment) nor a column of 16-byte words (a fetch) hits a bank of shared memory
// twice.
struct alignas(16) MmaRow {
  std::uint32_t words[kTileWords + 4];
};

template <class Storage>
struct MmaTile {
  static constexpr int kPack = 4 / sizeof(Storage);     // elements of a word
  static constexpr int kVector = 16 / sizeof(Storage);  // of 16 bytes
  static PYDIST_HD std::uint32_t bits(const Storage& value) {
    if constexpr (kPack == 2) {
      return value.bits;
    } else {
      return bits_as<std::uint32_t>(value);
    }
  }
};

// `first`, and the number of rows, columns or elements of k from it to the end of the extent.
struct MmaRange {
  std::int32_t first, count;
};

// Reads of the operands. Where channels are adjacent (channels-last), reads are 16 bytes wide
// (`wide_source`, `wide_gradient`), or 8 bytes where there are 4 or 12, ... channels of 16 bits.
template <ConvOp kOp, class Storage>
struct MmaLoad {
  using Gather = ConvGather<kOp>;
  using Place = typename Gather::Place;
  using Tap = typename Gather::Tap;
  using Tile = MmaTile<Storage>;
  static constexpr int kPack = Tile::kPack, kVector = Tile::kVector;
  static constexpr int kThreads = 128;
  static constexpr int kRowsAtOnce = kThreads / kTileWords;

  std::int32_t wide_source, wide_gradient;  // words of one read; 0: element by element

  static MmaLoad make(const Gather& gather) {
    const ConvProblem& p = gather.problem;
    MmaLoad loads{};
    loads.wide_source = words_together(gather.source(), gather.channels, p);
    if (kOp == ConvOp::kWgrad) {
      if (loads.wide_source < 4) loads.wide_source = 0;
      loads.wide_gradient = words_together(p.out, p.out_channels, p) < 4 ? 0 : 4;
    }
    return loads;
  }

  // Forward and dgrad, left: each thread gathers one row, which is its place, along all of k. The
  // tap advances after the last channel of a tap.
  template <class Copies>
  PYDIST_HD void gather_place(const Gather& gather, const Tap* taps, std::int32_t g,
                              const Place& place, bool is_row, MmaRange k, MmaRow& row,
                              Copies&& copies) const {
    const index_t stride = gather.source().strides[1];
    const auto* const source =
        static_cast<const Storage*>(gather.source().data) + g * gather.channels * stride;
    std::int32_t tap = gather.channel_count.quotient(k.first);
    std::int32_t channel = k.first - tap * gather.channels;
    if (wide_source == 4) {
      copy_row<4>(gather, taps, source, place, is_row, k, tap, channel, row, copies);
    } else if (wide_source == 2) {
      copy_row<2>(gather, taps, source, place, is_row, k, tap, channel, row, copies);
    } else {
      index_t offset = 0;
      bool inside = is_row && k.count > 0 && gather.find(place, taps[tap], offset);
      PYDIST_ROLLED
      for (int chunk = 0; chunk < kTileWords; chunk += 4) {
        Word<16> words{};
        for (int i = 0; i < 4 * kPack; ++i) {
          const bool wanted = chunk * kPack + i < k.count;
          if (wanted && channel == gather.channels) {
            channel = 0;
            inside = is_row && gather.find(place, taps[++tap], offset);
          }
          if (wanted && inside) {
            words.part[i / kPack] |= Tile::bits(source[offset + channel * stride])
                                     << (i % kPack * 16);
          }
          ++channel;
        }
        *reinterpret_cast<Word<16>*>(row.words + chunk) = words;
      }
    }
  }

  // wgrad, left: rows are pairs of a kernel index and a channel, k is a position. A thread has one
  // word of k in several rows, so that it finds the place of its positions once.
  template <int kRows>
  PYDIST_HD void gather_pairs(const Gather& gather, const Tap* taps, std::int32_t g, MmaRange rows,
                              MmaRange k, int thread, MmaRow* tile) const {
    const index_t stride = gather.source().strides[1];
    const auto* const source =
        static_cast<const Storage*>(gather.source().data) + g * gather.channels * stride;
    const int word = thread % kTileWords;
    Place places[kPack];
    for (int p = 0; p < kPack; ++p) {
      const int i = word * kPack + p;
      places[p] = gather.place(gather.position(i < k.count ? k.first + i : 0));
    }
    const auto find = [&](int row, int p, const Storage*& from) {
      if (row >= rows.count || word * kPack + p >= k.count) return false;
      const std::int32_t tap = gather.channel_count.quotient(rows.first + row);
      index_t offset;
      if (!gather.find(places[p], taps[tap], offset)) return false;
      from = source + offset + (rows.first + row - tap * gather.channels) * stride;
      return true;
    };
    fill<kRows>(wide_source != 0, thread, tile, find);
  }

  // wgrad, right: columns are channels of the output's gradient, k is a position.
  template <int kColumns>
  PYDIST_HD void gradient(const Gather& gather, std::int32_t g, MmaRange columns, MmaRange k,
                          int thread, MmaRow* tile) const {
    const ConvProblem& problem = gather.problem;
    const index_t stride = problem.out.strides[1];
    const auto* const source = static_cast<const Storage*>(problem.out.data) +
                               (g * problem.out_channels + columns.first) * stride;
    const int word = thread % kTileWords;
    index_t offsets[kPack] = {};
    for (int p = 0; p < kPack; ++p) {
      const int i = word * kPack + p;
      offsets[p] = gather.offset_of(gather.position(i < k.count ? k.first + i : 0));
    }
    const auto find = [&](int column, int p, const Storage*& from) {
      if (column >= columns.count || word * kPack + p >= k.count) return false;
      from = source + offsets[p] + column * stride;
      return true;
    };
    fill<kColumns>(wide_gradient != 0, thread, tile, find);
  }

  // Forward and dgrad, right: columns are the channels of the target, k is a pair as on the left.
  template <int kColumns>
  PYDIST_HD void weights(const Gather& gather, const Tap* taps, std::int32_t g, MmaRange columns,
                         MmaRange k, int thread, MmaRow* tile) const {
    const SpatialArray& weight = gather.problem.weight;
    constexpr bool kForward = kOp == ConvOp::kForward;
    const index_t of_column = weight.strides[kForward ? 0 : 1];
    const index_t of_depth = weight.strides[kForward ? 1 : 0];
    const auto* const source = static_cast<const Storage*>(weight.data) +
                               g * gather.problem.out_channels * weight.strides[0] +
                               columns.first * of_column;
    const int word = thread % kTileWords;
    index_t offsets[kPack] = {};
    for (int p = 0; p < kPack; ++p) {
      const int i = word * kPack + p;
      if (i >= k.count) continue;
      const std::int32_t tap = gather.channel_count.quotient(k.first + i);
      offsets[p] = taps[tap].weight + (k.first + i - tap * gather.channels) * of_depth;
    }
    const auto find = [&](int column, int p, const Storage*& from) {
      if (column >= columns.count || word * kPack + p >= k.count) return false;
      from = source + offsets[p] + column * of_column;
      return true;
    };
    fill<kColumns>(false, thread, tile, find);
  }

 private:
  // Words per read, 4 or 2, or 0 if channels must be read one by one: channels must be adjacent,
  // and the start of every read aligned to its size.
  static std::int32_t words_together(const SpatialArray& array, index_t channels,
                                     const ConvProblem& problem) {
    if (array.strides[1] != 1) return 0;
    index_t alignment = static_cast<index_t>(reinterpret_cast<std::uintptr_t>(array.data)) |
                        channels * static_cast<index_t>(sizeof(Storage)) | 16;
    for (int dim = 0; dim < 2 + kSpatialDims; ++dim) {
      const bool is_one = dim == 0 && problem.batch == 1;
      if (dim != 1 && !is_one) {
        alignment |= array.strides[dim] * static_cast<index_t>(sizeof(Storage));
      }
    }
    return alignment % 16 == 0 ? 4 : alignment % 8 == 0 ? 2 : 0;
  }

  // gather_place by copies of kWords words, which never straddle two taps.
  template <int kWords, class Copies>
  PYDIST_HD void copy_row(const Gather& gather, const Tap* taps, const Storage* source,
                          const Place& place, bool is_row, MmaRange k, std::int32_t tap,
                          std::int32_t channel, MmaRow& row, Copies&& copies) const {
    for (int word = 0; word < kTileWords; word += kWords) {
      index_t offset = 0;
      const bool inside = is_row && word * kPack < k.count && gather.find(place, taps[tap], offset);
      copies.template copy<4 * kWords>(row.words + word,
                                       inside ? source + offset + channel : source, inside);
      channel += kWords * kPack;
      if (channel == gather.channels) {
        channel = 0;
        ++tap;
      }
    }
  }

  // A thread fills one word of k in every eighth row. If `wide`, rows are adjacent channels: it
  // reads 16 bytes of them for each of its one or two positions, and transposes in registers.
  template <int kRows, class Find>
  PYDIST_HD void fill(bool wide, int thread, MmaRow* tile, const Find& find) const {
    const int word = thread % kTileWords;
    if (wide) {
      for (int row = thread / kTileWords * kVector; row < kRows; row += kRowsAtOnce * kVector) {
        Word<16> read[kPack] = {};
        for (int p = 0; p < kPack; ++p) {
          const Storage* from;
          if (find(row, p, from)) read[p] = *reinterpret_cast<const Word<16>*>(from);
        }
        for (int r = 0; r < kVector; ++r) {
          std::uint32_t joined = read[0].part[r / kPack];
          if constexpr (kPack == 2) {
            const std::uint32_t second = read[1].part[r / 2];
            joined = r % 2 == 0 ? (joined & 0xffffu) | second << 16
                                : joined >> 16 | (second & 0xffff0000u);
          }
          tile[row + r].words[word] = joined;
        }
      }
    } else {
      for (int row = thread / kTileWords; row < kRows; row += kRowsAtOnce) {
        std::uint32_t joined = 0;
        for (int p = 0; p < kPack; ++p) {
          const Storage* from;
          if (find(row, p, from)) joined |= Tile::bits(*from) << (16 * p);
        }
        tile[row].words[word] = joined;
      }
    }
  }
};

}  // namespace pydist::ops
