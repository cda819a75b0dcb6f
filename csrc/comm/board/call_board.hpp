// The calls that a rank has started in a group, on a page of memory that its neighbors read.
//
// Ranks of one machine share the pages. Each writes its own, without locks, and reads those of its
// neighbors: the rank that reaches a call second sees the call that the first has started. Fresh
// memory of zeros is a valid, empty page.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/shared_text.hpp"

namespace pydist::comm {

// A call as others see it.
struct SeenCall {
  std::int64_t number;  // from 1
  std::int64_t state;   // hash of all calls up to this one
  std::int64_t digest;  // of this one
  std::string text;     // cut to fit
};

// The slot of a call. A number of 0 means that it is being written.
//
// A reader compares the number before and after it reads the state: if both are the call's, the
// writer was not in between, and the state belongs to the call. The text may be half another one's
// (SharedText), as it is only shown.
class CallSlot {
 public:
  // One writer: the rank that owns the page.
  void store(std::int64_t number, std::int64_t state, std::int64_t digest, std::string_view text) {
    number_.store(0, std::memory_order_relaxed);
    state_.store(state, std::memory_order_release);  // a reader of it also sees the 0
    digest_.store(digest, std::memory_order_relaxed);
    text_.store(text);
    number_.store(number);
  }

  // The state after a call, if the slot holds that call; nothing if it holds another one or is
  // being written. Never waits: a writer that was killed half-way leaves a slot without a call.
  std::optional<std::int64_t> state_after(std::int64_t number) const {
    if (number_.load() != number) return std::nullopt;
    const std::int64_t state = state_.load(std::memory_order_acquire);
    if (number_.load(std::memory_order_relaxed) != number) return std::nullopt;
    return state;
  }

  std::optional<SeenCall> load(std::int64_t number) const {
    const auto state = state_after(number);
    if (!state) return std::nullopt;
    return SeenCall{number, *state, digest_.load(std::memory_order_relaxed), text_.load()};
  }

 private:
  std::atomic<std::int64_t> number_;
  std::atomic<std::int64_t> state_;
  std::atomic<std::int64_t> digest_;
  SharedText<38> text_;
};

static_assert(std::atomic<std::int64_t>::is_always_lock_free);

// The last calls of a rank, in a ring: call n is in slot n % kCalls. A rank that is kCalls or more
// calls ahead of another has overwritten the slot, so the two are not compared.
class CallPage {
 public:
  static constexpr std::int64_t kCalls = 64;

  CallSlot& slot(std::int64_t number) { return slots_[static_cast<std::size_t>(number % kCalls)]; }
  const CallSlot& slot(std::int64_t number) const {
    return slots_[static_cast<std::size_t>(number % kCalls)];
  }

 private:
  std::array<CallSlot, kCalls> slots_;
};

// What a rank has started in one group, and the comparison with its neighbors.
//
// The state is a running hash of all digests: once two ranks have made different calls, all of
// their later states differ, so a neighbor that was missed at the first difference is found at a
// later one. Not thread-safe: Python calls it with the GIL held. Pages and neighbors' pages are
// borrowed, and must outlive the board; until `share` it has a page of its own.
class CallBoard {
 public:
  using Stamp = std::array<std::int64_t, 4>;

  CallBoard() = default;
  CallBoard(const CallBoard&) = delete;
  CallBoard& operator=(const CallBoard&) = delete;

  std::int64_t count() const { return count_; }  // calls so far
  std::int64_t state() const { return state_; }  // 0 before the first call

  // Of the last call: its number, the state and the digest before it, and its own digest.
  Stamp stamp() const { return {count_, state_before_, digest_before_, digest_}; }

  // Enters the next call. digest: a hash of what all ranks must pass equally; text: for messages,
  // up to 304 bytes. Returns a neighbor whose call of this number left another state, or -1.
  // Neighbors that have not reached the call, or are too far ahead, are left out.
  int enter(std::int64_t digest, std::string_view text) {
    state_before_ = std::exchange(state_, mixed(state_, digest));
    digest_before_ = std::exchange(digest_, digest);
    ++count_;
    page_->slot(count_).store(count_, state_, digest, text);
    for (const auto& [rank, page] : neighbors_) {
      const auto theirs = page->slot(count_).state_after(count_);
      if (theirs && *theirs != state_) return rank;
    }
    return -1;
  }

  // Moves to a page that others read, with all calls entered so far.
  void share(CallPage& page, std::vector<std::pair<int, const CallPage*>> neighbors) {
    for (const SeenCall& call : recent()) {
      page.slot(call.number).store(call.number, call.state, call.digest, call.text);
    }
    page_ = &page;
    neighbors_ = std::move(neighbors);
  }

  // The calls that the page still holds, the latest at the end.
  std::vector<SeenCall> recent() const {
    std::vector<SeenCall> calls;
    const std::int64_t first = count_ > CallPage::kCalls ? count_ - CallPage::kCalls + 1 : 1;
    for (std::int64_t number = first; number <= count_; ++number) {
      if (auto call = page_->slot(number).load(number)) calls.push_back(std::move(*call));
    }
    return calls;
  }

  // A neighbor's call, if its page holds it.
  std::optional<SeenCall> call_of(int neighbor, std::int64_t number) const {
    for (const auto& [rank, page] : neighbors_) {
      if (rank == neighbor) return page->slot(number).load(number);
    }
    return std::nullopt;
  }

 private:
  // The end of MurmurHash3, over the state and the digest in this order.
  static std::int64_t mixed(std::int64_t state, std::int64_t digest) {
    auto bits = static_cast<std::uint64_t>(state) * 0x9e3779b97f4a7c15u;
    bits ^= static_cast<std::uint64_t>(digest);
    bits = (bits ^ (bits >> 33)) * 0xff51afd7ed558ccdu;
    bits = (bits ^ (bits >> 33)) * 0xc4ceb9fe1a85ec53u;
    return static_cast<std::int64_t>(bits ^ (bits >> 33));
  }

  std::int64_t count_ = 0;
  std::int64_t state_ = 0;
  std::int64_t digest_ = 0;
  std::int64_t state_before_ = 0;
  std::int64_t digest_before_ = 0;
  CallPage own_{};
  CallPage* page_ = &own_;
  std::vector<std::pair<int, const CallPage*>> neighbors_;
};

}  // namespace pydist::comm
