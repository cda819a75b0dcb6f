// Half-open boxes in global indices, from which every message is derived.
//
// A rank owns a box; an operator needs a box; the halo is needed minus owned, and a slab is the
// halo's intersection with the box of another rank (docs/architecture.md has the drawing).
#pragma once

#include <string>
#include <vector>

#include "core/index.hpp"

namespace pydist {

// The indices lo[d] <= i[d] < hi[d]; may be empty, and may reach outside the domain (padding).
//
// lo[d] <= hi[d] holds in every dim, and the volume fits into 64 bits: checked once, when a box is
// made, so that kernels and planners need no further checks. Immutable. Except for comparisons,
// functions of two boxes throw UsageError if these have different numbers of dims.
class Box {
 public:
  // An empty box without dims, for members that are assigned later.
  Box() = default;

  // Refuses lo above hi, and volumes that do not fit into 64 bits.
  Box(const Coords& lo, const Coords& hi) : lo_(lo), hi_(hi) {
    PYDIST_EXPECT(lo.ndim() == hi.ndim() && lo.ndim() >= 1,
                  "box with lo " + to_string(lo) + " and hi " + to_string(hi) +
                      ": both need the same number of dims, 1 to 8");
    for (int dim = 0; dim < lo.ndim(); ++dim) {
      PYDIST_EXPECT(lo[dim] <= hi[dim], "box with lo " + to_string(lo) + " above hi " +
                                            to_string(hi) + " in dim " + std::to_string(dim));
    }
    volume_ = volume_of(shape());
  }

  int ndim() const { return lo_.ndim(); }
  const Coords& lo() const { return lo_; }
  const Coords& hi() const { return hi_; }
  // Number of indices.
  index_t volume() const { return volume_; }
  bool empty() const { return volume_ == 0; }

  Coords shape() const {
    Coords shape(ndim());
    for (int dim = 0; dim < ndim(); ++dim) shape[dim] = checked_sub(hi_[dim], lo_[dim]);
    return shape;
  }

  // The common indices; empty, with hi = lo, if the boxes are disjoint.
  Box intersect(const Box& other) const {
    require_same_ndim(other);
    Coords lo(ndim()), hi(ndim());
    for (int dim = 0; dim < ndim(); ++dim) {
      lo[dim] = std::max(lo_[dim], other.lo_[dim]);
      hi[dim] = std::max(lo[dim], std::min(hi_[dim], other.hi_[dim]));
    }
    return Box(lo, hi);
  }

  // Whether the boxes have an index in common; never with an empty one.
  bool overlaps(const Box& other) const {
    require_same_ndim(other);
    if (empty() || other.empty()) return false;
    for (int dim = 0; dim < ndim(); ++dim) {
      if (lo_[dim] >= other.hi_[dim] || other.lo_[dim] >= hi_[dim]) return false;
    }
    return true;
  }

  // The box moved by `offset`, which may have any sign.
  Box shift(const Coords& offset) const {
    PYDIST_EXPECT(offset.ndim() == ndim(), "offset " + to_string(offset) + " for a box of " +
                                               std::to_string(ndim()) + " dims");
    Coords lo(ndim()), hi(ndim());
    for (int dim = 0; dim < ndim(); ++dim) {
      lo[dim] = checked_add(lo_[dim], offset[dim]);
      hi[dim] = checked_add(hi_[dim], offset[dim]);
    }
    return Box(lo, hi);
  }

  // Whether this box contains every index of `other`; true for an empty `other`.
  bool contains(const Box& other) const {
    require_same_ndim(other);
    if (other.empty()) return true;
    for (int dim = 0; dim < ndim(); ++dim) {
      if (other.lo_[dim] < lo_[dim] || other.hi_[dim] > hi_[dim]) return false;
    }
    return true;
  }

  // Empty boxes are equal only if they are at the same place.
  friend bool operator==(const Box& a, const Box& b) { return a.lo_ == b.lo_ && a.hi_ == b.hi_; }
  // By lo, then by hi: an order for maps, without a geometric meaning.
  friend bool operator<(const Box& a, const Box& b) {
    return a.lo_ == b.lo_ ? a.hi_ < b.hi_ : a.lo_ < b.lo_;
  }

 private:
  void require_same_ndim(const Box& other) const {
    PYDIST_EXPECT(ndim() == other.ndim(), "boxes of " + std::to_string(ndim()) + " and " +
                                              std::to_string(other.ndim()) + " dims");
  }

  Coords lo_, hi_;
  index_t volume_ = 0;
};

// "Box((0, 0), (2, 3))": lo, then hi.
inline std::string to_string(const Box& box) {
  return "Box(" + to_string(box.lo()) + ", " + to_string(box.hi()) + ")";
}

inline std::size_t hash_of(const Box& box) {
  std::size_t seed = hash_of(box.lo());
  hash_combine(seed, hash_of(box.hi()));
  return seed;
}

// `outer` without `inner`, as at most 2 * ndim disjoint boxes. Dim 0 is cut first, so that the
// largest slabs are contiguous in C order:
//
//   +-----------+
//   |     0     |      0, 1: over the full extent of dim 1
//   +---+---+---+
//   | 2 |   | 3 |      2, 3: over the rest of dim 0
//   +---+---+---+
//   |     1     |
//   +-----------+
inline std::vector<Box> subtract(const Box& outer, const Box& inner) {
  const Box hole = outer.intersect(inner);
  if (outer.empty()) return {};
  if (hole.empty()) return {outer};
  std::vector<Box> slabs;
  Coords lo = outer.lo(), hi = outer.hi();
  for (int dim = 0; dim < outer.ndim(); ++dim) {
    if (lo[dim] < hole.lo()[dim]) {
      Coords slab_hi = hi;
      slab_hi[dim] = hole.lo()[dim];
      slabs.emplace_back(lo, slab_hi);
    }
    if (hole.hi()[dim] < hi[dim]) {
      Coords slab_lo = lo;
      slab_lo[dim] = hole.hi()[dim];
      slabs.emplace_back(slab_lo, hi);
    }
    lo[dim] = hole.lo()[dim];
    hi[dim] = hole.hi()[dim];
  }
  return slabs;
}

}  // namespace pydist
