// The page of shared memory on which the ranks of a machine record their progress.
//
// Each rank writes its own slot, with atomics and without locks or clocks; the watchdog thread of
// every rank reads all of them. Fresh memory of zeros is a valid, empty board. A rank that is
// killed in the middle of a store leaves a board that others can still read.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

#include "core/shared_text.hpp"

namespace pydist::watchdog {

// The kinds of work in which a rank may be, by rising significance of nested frames; only kEnd
// outranks all others (Slot::kind). judge.hpp says how long each may be silent. Python has them by
// number (csrc/bindings/watchdog.cpp).
enum class PhaseKind : std::uint32_t {
  kSpan,     // local work, or none
  kEnd,      // the end of the program: it waits for the others to end, and sends nothing more
  kBlocked,  // a call that returns soon, unless a file, a device or the launcher does not answer
  kWait,     // an exchange: it waits for other ranks
  kWork,     // long work that is expected to be silent: tuning, saving, opening files
};

// An open span of a rank's work, with its name for the report.
struct Frame {
  std::atomic<PhaseKind> kind;
  SharedText<6> name;
};

// The most frames that a slot stores. Deeper ones are counted, so that leave closes the right one.
inline constexpr std::uint32_t kFrames = 8;

// One rank's part of the page. Only its own process writes here.
struct Slot {
  std::atomic<std::int32_t> pid;      // 0 until the rank has joined
  std::atomic<std::uint32_t> depth;   // open frames; those beyond kFrames are not stored
  std::atomic<std::uint64_t> beats;   // grows with every action of the rank
  std::atomic<std::int64_t> step;     // training forwards so far
  std::atomic<std::int32_t> stacks;   // file descriptor for the rank's stacks
  std::atomic<std::uint32_t> told;    // number of reports that the rank has prepared for
  std::array<Frame, kFrames> frames;  // the innermost last
  SharedText<16> layer;               // at work at the time of the report, "" if unknown
  SharedText<48> call;                // in which the rank waits, "" if unknown

  // Opens a frame. Name and kind are stored before the depth that shows them, so a watchdog that
  // reads the depth sees the frame.
  void enter(std::string_view name, PhaseKind kind) {
    const std::uint32_t place = depth.load(std::memory_order_relaxed);
    if (place < kFrames) {
      frames[place].name.store(name);
      frames[place].kind.store(kind, std::memory_order_relaxed);
    }
    depth.store(place + 1, std::memory_order_release);
    beat();
  }

  // Closes the innermost frame. Without one it only counts as an action.
  void leave() {
    const std::uint32_t place = depth.load(std::memory_order_relaxed);
    if (place > 0) depth.store(place - 1, std::memory_order_release);
    beat();
  }

  // Two threads of a rank may lose a count, which does not matter.
  void beat() { beats.store(beats.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }

  std::uint32_t open_frames() const {
    return std::min(depth.load(std::memory_order_acquire), kFrames);
  }

  // The most significant of the open frames: an end includes all waits within it.
  PhaseKind kind() const {
    PhaseKind found = PhaseKind::kSpan;
    for (std::uint32_t i = 0; i < open_frames(); ++i) {
      const PhaseKind each = frames[i].kind.load(std::memory_order_relaxed);
      if (each == PhaseKind::kEnd) return each;
      found = std::max(found, each);
    }
    return found;
  }

  // The rank's present kind of work. Long work has more time, and a rank may wait for others in it.
  PhaseKind activity() const {
    PhaseKind found = PhaseKind::kSpan;
    for (std::uint32_t i = 0; i < open_frames(); ++i) {
      const PhaseKind each = frames[i].kind.load(std::memory_order_relaxed);
      if (each == PhaseKind::kEnd) return each;
      found = each == PhaseKind::kWork ? PhaseKind::kSpan : std::max(found, each);
    }
    return found;
  }
};

// The page. The first watchdog that sees the hang makes itself the reporter, by a compare-and-swap;
// the others write their own part and wait for `reported`. All processes of a machine map the same
// file, of bytes(ranks of the job).
struct Board {
  std::atomic<std::int32_t> reporter;   // process that reports a hang, 0 while there is none
  std::atomic<std::uint32_t> reports;   // examined hangs, debuggers included
  std::atomic<std::uint32_t> reported;  // not 0: the report is out, all ranks end
  std::array<Slot, 1> slots;            // as many as the job has ranks

  // Bytes of a board with a slot for each rank: the array above has the first of them.
  static std::size_t bytes(std::size_t ranks) {
    return sizeof(Board) + sizeof(Slot) * (ranks > 0 ? ranks - 1 : 0);
  }
  Slot& slot(std::size_t rank) { return slots.data()[rank]; }
  const Slot& slot(std::size_t rank) const { return slots.data()[rank]; }
};

static_assert(std::atomic<PhaseKind>::is_always_lock_free);

}  // namespace pydist::watchdog
