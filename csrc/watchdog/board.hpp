// The page of shared memory on which the ranks of a machine say what they do.
//
// Each rank writes its own slot, with relaxed atomics and without locks or clocks; the watchdog
// thread of every rank reads all of them. Fresh memory of zeros is a valid, empty board.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

#include "core/shared_text.hpp"

namespace pydist::watchdog {

// What a rank may be in the middle of, in the order of how much it says.
enum class Kind : std::uint32_t {
  kSpan,     // something of its own, or nothing
  kEnd,      // the end of the program: it waits for the others to come there, sends nothing more
  kBlocked,  // a call that returns soon, unless a file, a device or the launcher does not answer
  kWait,     // an exchange: it waits for other ranks
  kWork,     // long work that is expected to be silent: tuning, saving, opening files
};

struct Frame {
  std::atomic<Kind> kind;
  SharedText<6> name;
};

inline constexpr std::uint32_t kFrames = 8;

// What one rank says. Only its own process writes here.
struct Slot {
  std::atomic<std::int32_t> pid;      // 0 until the rank has come
  std::atomic<std::uint32_t> depth;   // open frames; those beyond kFrames have no place
  std::atomic<std::uint64_t> beats;   // grows with everything that the rank does
  std::atomic<std::int64_t> step;     // training forwards so far
  std::atomic<std::int32_t> stacks;   // file descriptor that the rank's stacks are written to
  std::atomic<std::uint32_t> told;    // how many reports the rank has prepared for
  std::array<Frame, kFrames> frames;  // the innermost last
  SharedText<16> layer;               // at work when the rank was asked, "" if unknown
  SharedText<48> call;                // that the rank waits in, the same way

  void enter(std::string_view name, Kind kind) {
    const std::uint32_t place = depth.load(std::memory_order_relaxed);
    if (place < kFrames) {
      frames[place].name.store(name);
      frames[place].kind.store(kind, std::memory_order_relaxed);
    }
    depth.store(place + 1, std::memory_order_release);
    beat();
  }

  void leave() {
    const std::uint32_t place = depth.load(std::memory_order_relaxed);
    if (place > 0) depth.store(place - 1, std::memory_order_release);
    beat();
  }

  // Two threads of a rank may lose a count, which changes nothing.
  void beat() { beats.store(beats.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }

  std::uint32_t open_frames() const {
    return std::min(depth.load(std::memory_order_acquire), kFrames);
  }

  // What decides about the rank among its open frames: an end holds whatever is waited for in it.
  Kind kind() const {
    Kind found = Kind::kSpan;
    for (std::uint32_t i = 0; i < open_frames(); ++i) {
      const Kind each = frames[i].kind.load(std::memory_order_relaxed);
      if (each == Kind::kEnd) return each;
      found = std::max(found, each);
    }
    return found;
  }

  // What the rank does now. Long work allows for more time, and a rank may wait for others in it.
  Kind activity() const {
    Kind found = Kind::kSpan;
    for (std::uint32_t i = 0; i < open_frames(); ++i) {
      const Kind each = frames[i].kind.load(std::memory_order_relaxed);
      if (each == Kind::kEnd) return each;
      found = each == Kind::kWork ? Kind::kSpan : std::max(found, each);
    }
    return found;
  }
};

struct Board {
  std::atomic<std::int32_t> reporter;   // process that reports a hang, 0 while there is none
  std::atomic<std::uint32_t> reports;   // hangs that were looked into, debuggers included
  std::atomic<std::uint32_t> reported;  // not 0: the report is out, all ranks end
  std::array<Slot, 1> slots;            // as many as the job has ranks

  static std::size_t bytes(std::size_t ranks) {
    return sizeof(Board) + sizeof(Slot) * (ranks > 0 ? ranks - 1 : 0);
  }
  Slot& slot(std::size_t rank) { return slots.data()[rank]; }
  const Slot& slot(std::size_t rank) const { return slots.data()[rank]; }
};

static_assert(std::atomic<Kind>::is_always_lock_free);

}  // namespace pydist::watchdog
