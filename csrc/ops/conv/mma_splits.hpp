// How many blocks share the sums of one tile of a boundary convolution on tensor cores.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "launch/decomposition.hpp"
#include "ops/common/divisor.hpp"

namespace pydist::ops {

// The sum of a tile has `parts`, which a second launch adds up; the sum of a part is that of the
// blocks of a cluster. Each block does up to `steps` steps.
//
// In cycles of an H100, estimated: a step takes 200, adding up the sums of a cluster 1200, and a
// second launch 3500. Hence clusters are made from 16 steps on, of 4 steps or more a block, and
// parts where a block of a cluster has 24 steps or more, of 8 or more.
//
// Index formula: block `rank` of the cluster of part p makes the steps s with
//   (p * cluster + rank) * steps <= s < (p * cluster + rank + 1) * steps, s below the tile's
//   number. These intervals are disjoint, and parts * cluster * steps is at least that number: each
//   product is added once.
// Threads: a cluster is `cluster` adjacent blocks of the launch; each of them sums and writes
//   its share of the tile's rows.
// Traffic: the sums of a cluster go through shared memory; those of two or more parts are written
//   and read again, 8 bytes per part and output.
// Proof: tests/native/test_conv_mma.cpp (MmaSplits, ConvMmaSums).
struct MmaSplits {
  static constexpr index_t kWantedBlocks = 396;  // three for each multiprocessor of an H100
  static constexpr index_t kFewSteps = 16, kStepsInCluster = 4;
  static constexpr index_t kManySteps = 24, kStepsInPart = 8;

  std::int32_t parts, cluster, cluster_bits, steps;  // the cluster is a power of two
  Divisor part_count, ranks;

  // Depends only on the problem, and not on the device.
  static MmaSplits of(index_t tiles, index_t steps) {
    const index_t wanted = kWantedBlocks / std::max<index_t>(tiles, 1);
    index_t cluster = 1, parts = 1;
    while (steps >= kFewSteps && cluster * 2 <= std::min<index_t>(launch::kMaxCluster, wanted) &&
           steps / (cluster * 2) >= kStepsInCluster) {
      cluster *= 2;
    }
    const index_t each = steps / cluster;
    if (each >= kManySteps) {
      parts = std::max<index_t>(1, std::min(wanted / cluster, each / kStepsInPart));
    }
    return make(parts, cluster, ceil_div(steps, parts * cluster));
  }

  // The same parts, by single blocks.
  MmaSplits alone() const { return make(parts, 1, index_t{steps} * cluster); }

 private:
  static MmaSplits make(index_t parts, index_t cluster, index_t steps) {
    return {static_cast<std::int32_t>(parts),
            static_cast<std::int32_t>(cluster),
            static_cast<std::int32_t>(std::bit_width(static_cast<unsigned>(cluster))) - 1,
            static_cast<std::int32_t>(steps),
            Divisor::by(parts),
            Divisor::by(cluster)};
  }
};

}  // namespace pydist::ops
