// The page of shared memory on which the ranks of a machine record their progress.
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

// The kinds of work in which a rank may be, by rising significance.
enum class Kind : std::uint32_t {
  kSpan,     // local work, or none
  kEnd,      // the end of the program: it waits for the others to end, and sends nothing more
  kBlocked,  // a call that returns soon, unless a file, a device or the launcher does not answer
  kWait,     // an exchange: it waits for other ranks
  kWork,     // long work that is expected to be silent: tuning, saving, opening files
};

struct Frame {
  std::atomic<Kind> kind;
  SharedText<6> name;
};

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
  void enter(std::string_view name, Kind kind) {
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
  Kind kind() const {
    Kind found = Kind::kSpan;
    for (std::uint32_t i = 0; i < open_frames(); ++i) {
      const Kind each = frames[i].kind.load(std::memory_order_relaxed);
      if (each == Kind::kEnd) return each;
      found = std::max(found, each);
    }
    return found;
  }

  // The rank's present kind of work. Long work has more time, and a rank may wait for others in it.
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
  std::atomic<std::uint32_t> reports;   // examined hangs, debuggers included
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
