// Regions: the boxes of one message, in the order in which their elements are stored in its buffer.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "core/box.hpp"

namespace pydist::ops {

// Boxes in local indices of a view. In the buffer the boxes follow each other without gaps, each in
// C order of its indices, whatever the strides of the view: sender and receiver may have different
// strides.
class Regions {
 public:
  // One box and the offset of its first element in the buffer, in elements.
  struct Part {
    Box box;
    index_t offset;
  };
  // Parts [begin, end) that are disjoint from each other.
  struct Group {
    std::size_t begin, end;
  };

  explicit Regions(const std::vector<Box>& boxes) {
    for (const Box& box : boxes) {
      PYDIST_EXPECT(box.ndim() == boxes.front().ndim(),
                    "regions of " + std::to_string(boxes.front().ndim()) + " and " +
                        std::to_string(box.ndim()) + " dims: all boxes need the same number");
      parts_.push_back({box, elements_});
      elements_ = checked_add(elements_, box.volume());
    }
    split_at_overlaps();
  }

  const std::vector<Part>& parts() const { return parts_; }
  // Boxes that overlap an earlier one start a new group: writes run group after group, so that
  // their order, and the rounding of sums, does not depend on threads.
  const std::vector<Group>& disjoint_groups() const { return groups_; }
  index_t elements() const { return elements_; }
  index_t count() const { return static_cast<index_t>(parts_.size()); }

  // Refuses a view that does not hold all boxes. `name`: the view's name, for the message.
  void require_inside(const Coords& shape, const std::string& name) const {
    if (parts_.empty()) return;
    PYDIST_EXPECT(parts_.front().box.ndim() == shape.ndim(),
                  name + " has shape " + to_string(shape) + ", the regions have " +
                      std::to_string(parts_.front().box.ndim()) + " dims");
    const Box whole(Coords(shape.ndim()), shape);
    for (const Part& part : parts_) {
      PYDIST_EXPECT(whole.contains(part.box), to_string(part.box) + " does not lie in " + name +
                                                  " of shape " + to_string(shape));
    }
  }

 private:
  // Greedy: a group grows until a box overlaps one of its members. Quadratic in the boxes of a
  // group, of which a message has some tens.
  void split_at_overlaps() {
    std::size_t begin = 0;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      for (std::size_t j = begin; j < i; ++j) {
        if (!parts_[i].box.overlaps(parts_[j].box)) continue;
        groups_.push_back({begin, i});
        begin = i;
        break;
      }
    }
    if (begin < parts_.size()) groups_.push_back({begin, parts_.size()});
  }

  std::vector<Part> parts_;
  std::vector<Group> groups_;
  index_t elements_ = 0;
};

}  // namespace pydist::ops
