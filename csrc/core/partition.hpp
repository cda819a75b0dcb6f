// Partition: the split points of one dim, even or uneven. A layout has one per cut dim.
//
//   points  0     4     8   11        extent 11 in 3 parts
//   part    | 0   | 1   | 2 |
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/index.hpp"

namespace pydist {

using Interval = std::pair<index_t, index_t>;  // half-open [first, second)

// Part i holds the indices points[i] <= index < points[i + 1]. Parts may be empty. They cover
// [0, extent) and are disjoint: the constructor refuses points for which this would not hold.
// Immutable. All functions throw UsageError if an argument is out of range.
class Partition {
 public:
  // `points`: from 0 to the extent, never decreasing; parts + 1 of them.
  explicit Partition(std::vector<index_t> points) : points_(std::move(points)) {
    PYDIST_EXPECT(points_.size() >= 2 && points_.front() == 0 && std::ranges::is_sorted(points_),
                  "split points " + describe() +
                      ": they must start at 0, never decrease, and be at least two");
  }

  // Sizes differ by at most one; the first extent % parts parts are the larger ones: 11 in 3 parts
  // is 4, 4, 3. Parts are empty only if there are more parts than indices.
  static Partition even(index_t extent, index_t parts) {
    require(extent, parts);
    std::vector<index_t> points{0};
    for (index_t part = 0; part < parts; ++part) {
      points.push_back(points.back() + extent / parts + (part < extent % parts ? 1 : 0));
    }
    return Partition(std::move(points));
  }

  // The split points; the first one is 0, the last one the extent.
  const std::vector<index_t>& points() const { return points_; }
  index_t parts() const { return static_cast<index_t>(points_.size()) - 1; }
  index_t extent() const { return points_.back(); }

  // The indices of a part.
  Interval interval(index_t part) const {
    PYDIST_EXPECT(
        part >= 0 && part < parts(),
        "part " + std::to_string(part) + " of a partition into " + std::to_string(parts()));
    const auto at = static_cast<std::size_t>(part);
    return {points_[at], points_[at + 1]};
  }

  // The part that holds `index`; never an empty one. O(log parts).
  index_t owner(index_t index) const {
    PYDIST_EXPECT(
        index >= 0 && index < extent(),
        "index " + std::to_string(index) + " outside the extent " + std::to_string(extent()));
    return std::ranges::upper_bound(points_, index) - points_.begin() - 1;
  }

  friend bool operator==(const Partition& a, const Partition& b) { return a.points_ == b.points_; }

  // The split points as text, for messages: "[0, 4, 8, 11]".
  std::string describe() const {
    std::string text = "[";
    for (std::size_t i = 0; i < points_.size(); ++i) {
      text += (i > 0 ? ", " : "") + std::to_string(points_[i]);
    }
    return text + "]";
  }

 private:
  static void require(index_t extent, index_t parts) {
    PYDIST_EXPECT(extent >= 0 && parts >= 1, "extent " + std::to_string(extent) + " in " +
                                                 std::to_string(parts) +
                                                 " parts: need extent >= 0 and parts >= 1");
  }

  std::vector<index_t> points_;
};

}  // namespace pydist
