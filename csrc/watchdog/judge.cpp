// Decides whether a job hangs; judge.hpp has the rule.
#include "watchdog/judge.hpp"

#include <algorithm>
#include <limits>

namespace pydist::watchdog {
namespace {

// Ranks that all wait for each other can't continue, but a large message may be in flight.
constexpr double kDeadlockSeconds = 10;
constexpr double kDeadlockPart = 0.1;
// A machine whose ranks all wait lets the machine of the awaited rank report first.
constexpr double kModestSeconds = 0.5;

}  // namespace

double Judge::allowed(const std::vector<Sample>& ranks) const {
  std::size_t waits = 0, blocked = 0, works = 0, ends = 0;
  for (const Sample& each : ranks) {
    if (!each.joined) continue;
    waits += each.kind == PhaseKind::kWait;
    blocked += each.kind == PhaseKind::kBlocked;
    works += each.kind == PhaseKind::kWork;
    ends += each.kind == PhaseKind::kEnd;
  }
  if (works > 0) return kPatience * limit_;
  if (waits + blocked > 0) {
    const bool none_computes = waits + ends == ranks.size();
    if (!none_computes) return limit_;
    if (!all_here_) return limit_ + kModestSeconds;
    return std::min(limit_, std::max(kDeadlockSeconds, kDeadlockPart * limit_));
  }
  if (ends > 0) return kPatience * limit_;
  return std::numeric_limits<double>::infinity();
}

std::optional<double> Judge::look(double now, const std::vector<Sample>& ranks) {
  std::vector<std::uint64_t> beats;
  for (const Sample& each : ranks) beats.push_back(each.joined ? each.beats + 1 : 0);
  if (beats != seen_) {
    seen_ = std::move(beats);
    progress_ = now;
  }
  const double silent = now - progress_;
  if (silent > allowed(ranks)) return silent;
  return std::nullopt;
}

}  // namespace pydist::watchdog
