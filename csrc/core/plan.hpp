// The exchange planner: intersects owned and needed boxes of all ranks to find every message.
//
//   message(source -> receiver) = owned(source) ∩ needed(receiver, slot), for each of its slots
//
// Every rank evaluates its own row (receives) and column (sends) of that matrix from the same spec:
// nothing is negotiated, and both ends list the same boxes in the same order.
// Proof: tests/property/test_geometry.py, tests/native/test_core_plan.cpp.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/box.hpp"

namespace pydist {

// The transfer of one box, a part of the receiver's needed box number `slot`.
struct Transfer {
  Box box;
  int slot = 0;
  friend bool operator==(const Transfer&, const Transfer&) = default;
};

// The message between this rank and `peer` in one direction: the concatenation of its transfers,
// which both sides list in the same order.
struct Message {
  int peer = 0;
  std::vector<Transfer> transfers;

  // Elements of the message. One element can count twice, if it is in two slots.
  index_t elements() const {
    index_t total = 0;
    for (const Transfer& transfer : transfers) {
      total = checked_add(total, transfer.box.volume());
    }
    return total;
  }
  friend bool operator==(const Message&, const Message&) = default;
};

// The messages of one exchange as seen by `rank`. Immutable, holds no buffers.
//
// There is at most one message per peer and direction, and none without elements. The message of
// rank a to rank b has the same transfers in a's sends as in b's recvs, so a message needs no
// header.
struct Plan {
  int rank = 0;
  std::vector<Transfer> copies;  // within this rank
  std::vector<Message> sends;    // sorted by peer
  std::vector<Message> recvs;    // sorted by peer
};

// The input of the planner; equal on all ranks, or their messages will not match. Boxes are in
// global indices. A rank may own an empty box, and need none. What no rank owns of a needed box
// (padding) is in no message, and stays as it is in the receiver's memory.
struct ExchangeSpec {
  std::vector<Box> owned;                // by rank; equal boxes are replicas, others are disjoint
  std::vector<std::vector<Box>> needed;  // by rank, then slot
};

// Plans for the ranks of one spec.
class Planner {
 public:
  // Checks the full spec, so that every rank refuses a wrong one, not only the affected ranks: else
  // the others would wait for messages that never arrive. Throws UsageError.
  explicit Planner(const ExchangeSpec& spec) : spec_(spec) {
    PYDIST_EXPECT(!spec.owned.empty() && spec.owned.size() == spec.needed.size(),
                  "owned boxes for " + std::to_string(spec.owned.size()) + " ranks, needed for " +
                      std::to_string(spec.needed.size()) + ": both need one entry a rank");
    ndim_ = spec.owned.front().ndim();
    for (int rank = 0; rank < ranks(); ++rank) {
      check_rank(rank);
      const Box& box = owned(rank);
      if (!box.empty()) holders_[box].push_back(rank);
    }
    check_disjoint();
  }

  explicit Planner(ExchangeSpec&&) = delete;  // the spec must outlive its planner

  // Cost: O(distinct owned boxes + ranks), times slots.
  Plan plan(int rank) const {
    PYDIST_EXPECT(rank >= 0 && rank < ranks(),
                  "rank " + std::to_string(rank) + " of " + std::to_string(ranks()));
    Plan plan;
    plan.rank = rank;
    std::map<int, Message> recvs;
    for (const auto& [box, holders] : holders_) {
      const int source = source_of(holders, rank);
      std::vector<Transfer> transfers = transfers_between(box, rank);
      if (transfers.empty()) continue;
      // A rank owns one box, so this is the only message from `source`.
      if (source == rank) {
        plan.copies = std::move(transfers);
      } else {
        recvs[source] = Message{source, std::move(transfers)};
      }
    }
    for (auto& [peer, message] : recvs) plan.recvs.push_back(std::move(message));
    if (!owned(rank).empty()) plan.sends = plan_sends(rank);
    return plan;
  }

 private:
  int ranks() const { return static_cast<int>(spec_.owned.size()); }
  const Box& owned(int rank) const { return spec_.owned[static_cast<std::size_t>(rank)]; }

  // The column of this rank: all others that take its box from this replica.
  std::vector<Message> plan_sends(int rank) const {
    std::vector<Message> sends;
    const std::vector<int>& holders = holders_.at(owned(rank));
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer == rank || source_of(holders, peer) != rank) continue;
      std::vector<Transfer> transfers = transfers_between(owned(rank), peer);
      if (!transfers.empty()) sends.push_back(Message{peer, std::move(transfers)});
    }
    return sends;
  }

  // A replica serves itself; other receivers are spread over the replicas. A function of the spec
  // alone, so that sender and receiver agree without a message. `holders` ascend.
  static int source_of(const std::vector<int>& holders, int receiver) {
    if (std::ranges::binary_search(holders, receiver)) return receiver;
    return holders[static_cast<std::size_t>(receiver) % holders.size()];
  }

  // The transfers from `box` to `receiver`, ordered by slot.
  std::vector<Transfer> transfers_between(const Box& box, int receiver) const {
    std::vector<Transfer> transfers;
    const std::vector<Box>& slots = spec_.needed[static_cast<std::size_t>(receiver)];
    for (std::size_t slot = 0; slot < slots.size(); ++slot) {
      const Box common = box.intersect(slots[slot]);
      if (!common.empty()) transfers.push_back({common, static_cast<int>(slot)});
    }
    return transfers;
  }

  // All boxes have the same number of dims.
  void check_rank(int rank) const {
    const Box& box = owned(rank);
    PYDIST_EXPECT(box.ndim() == ndim_, "rank " + std::to_string(rank) + " owns " + to_string(box) +
                                           ", rank 0 a box of " + std::to_string(ndim_) + " dims");
    for (const Box& needed : spec_.needed[static_cast<std::size_t>(rank)]) {
      PYDIST_EXPECT(needed.ndim() == ndim_, "rank " + std::to_string(rank) + " needs " +
                                                to_string(needed) + ", boxes have " +
                                                std::to_string(ndim_) + " dims");
    }
  }

  // Overlapping shards would send an element twice. Boxes are visited by rising lo[0].
  void check_disjoint() const {
    for (auto a = holders_.begin(); a != holders_.end(); ++a) {
      for (auto b = std::next(a); b != holders_.end(); ++b) {
        if (b->first.lo()[0] >= a->first.hi()[0]) break;
        PYDIST_EXPECT(!a->first.overlaps(b->first),
                      "ranks " + std::to_string(a->second.front()) + " and " +
                          std::to_string(b->second.front()) + " own overlapping boxes " +
                          to_string(a->first) + " and " + to_string(b->first) +
                          ": boxes must be equal or disjoint");
      }
    }
  }

  const ExchangeSpec& spec_;
  int ndim_ = 0;
  std::map<Box, std::vector<int>> holders_;  // ranks of each distinct owned box, ascending
};

// The plan of one exchange for `rank`. Received and copied boxes cover, disjointly, what `rank`
// needs and some rank owns.
inline Plan plan_exchange(const ExchangeSpec& spec, int rank) { return Planner(spec).plan(rank); }

}  // namespace pydist
