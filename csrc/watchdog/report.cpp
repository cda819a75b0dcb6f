// The text of a report: the ranks that hang, and the work of each.
#include "watchdog/report.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <sstream>
#include <string_view>

namespace pydist::watchdog {
namespace {

// Frames by the text of their line in a stack: of pydist's own threads, anywhere in the stack; of
// an idle thread of an executor, the innermost; of debuggers.
constexpr std::array<std::string_view, 2> kOwn{"pydist/launch/launcher_socket.py\"",
                                               "pydist/launch/watch.py\""};
constexpr std::array<std::string_view, 2> kIdle{"concurrent/futures/thread.py\"", " in _worker"};
constexpr std::array<std::string_view, 4> kDebuggers{"/bdb.py\"", "/pdb.py\"", "pydevd",
                                                     "/debugpy/"};

std::string seconds(double value) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.3g", value);
  return text.data();
}

// The order of blame: 0 for a rank that others wait for and that does not wait itself.
int order(const Slot& slot, const Finding& found) {
  if (found.state.is_stopped() || found.state.is_gone()) return 0;
  switch (slot.activity()) {
    case PhaseKind::kEnd:
      return 1;
    case PhaseKind::kBlocked:
      return 2;
    case PhaseKind::kWait:
      return 3;
    default:
      return 0;
  }
}

std::string how(const Slot& slot, const Finding& found) {
  const ProcessState& state = found.state;
  if (state.is_gone()) return "has ended";
  const std::string inside = state.inside.empty() ? "" : " in " + state.inside;
  if (state.is_stopped()) {
    return std::string("is stopped (state ") + state.letter + inside + ")";
  }
  if (state.letter == 'D') return "waits for a disk or a driver (state D" + inside + ")";
  switch (slot.activity()) {
    case PhaseKind::kEnd:
      return "has reached the end of its program";
    case PhaseKind::kBlocked:
      return "is in a call that does not return";
    case PhaseKind::kWait:
      return "waits for other ranks";
    default:
      break;
  }
  return state.letter == 'R' ? "computes, and waits for no rank" : "sleeps, and waits for no rank";
}

}  // namespace

std::string doing(const Slot& slot) {
  std::string text;
  for (std::uint32_t i = 0; i < slot.open_frames(); ++i) {
    const std::string name = slot.frames[i].name.load();
    if (!text.empty() && !name.empty()) text += ": ";
    text += name;
  }
  return text.empty() ? "the program's own code" : text;
}

std::string busy_threads(const std::string& stacks) {
  // faulthandler's form: a line that ends in "(most recent call first):", a line per frame, then an
  // empty one.
  std::istringstream lines(stacks);
  std::string line, block, kept;
  int frames = 0;
  bool idle = false;
  const auto end_block = [&] {
    if (!idle) kept += block;
    block.clear();
    frames = 0;
    idle = false;
  };
  while (std::getline(lines, line)) {
    if (line.empty()) continue;
    if (line.find("(most recent call first)") != std::string::npos) {
      end_block();
    } else {
      const auto holds = [&](std::string_view each) { return line.find(each) != line.npos; };
      idle = idle || std::any_of(kOwn.begin(), kOwn.end(), holds) ||
             (frames == 0 && std::all_of(kIdle.begin(), kIdle.end(), holds));
      ++frames;
    }
    block += line + "\n";
  }
  end_block();
  return kept;
}

bool in_debugger(const std::string& stacks) {
  return std::any_of(kDebuggers.begin(), kDebuggers.end(),
                     [&](std::string_view each) { return stacks.find(each) != std::string::npos; });
}

std::string describe(const Job& job, const Board& board, const std::vector<Finding>& ranks,
                     double silent, const std::string& elsewhere) {
  std::vector<Finding> sorted = ranks;
  std::stable_sort(sorted.begin(), sorted.end(), [&](const Finding& a, const Finding& b) {
    return order(board.slot(a.rank), a) < order(board.slot(b.rank), b);
  });
  std::ostringstream text;
  text << "pydist: hang: no rank of " << job.host << " has made progress for " << seconds(silent)
       << " s (PYDIST_HANG_LIMIT=" << seconds(job.limit) << "); the job ends with code 72\n";
  std::string missing;
  if (job.all_here) {
    for (int rank = 0; rank < job.size; ++rank) {
      if (board.slot(rank).pid.load() == 0) {
        missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(rank);
      }
    }
  } else if (static_cast<int>(ranks.size()) < job.here) {
    missing = std::to_string(job.here - static_cast<int>(ranks.size())) + " ranks of this machine";
  }
  if (!missing.empty()) text << "  has not reached pydist.init: " << missing << "\n";
  for (const Finding& each : sorted) {
    const Slot& slot = board.slot(each.rank);
    text << "  rank " << each.rank << " (host " << job.host << ", process " << each.pid << ") "
         << how(slot, each) << ": step " << slot.step.load() << ", phase '" << doing(slot) << "'";
    const std::string layer = slot.layer.load();
    if (!layer.empty()) text << ", layer " << layer;
    const std::string call = slot.call.load();
    if (!call.empty()) text << ", in " << call;
    text << "\n";
  }
  std::istringstream others(elsewhere);
  std::string other;
  while (std::getline(others, other)) text << "  " << other << "\n";
  for (const Finding& each : sorted) {
    std::istringstream lines(busy_threads(each.stacks));
    std::string line;
    while (std::getline(lines, line)) text << "[rank " << each.rank << "] " << line << "\n";
  }
  return text.str();
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char each : text) {
    const auto byte = static_cast<unsigned char>(each);
    if (each == '"' || each == '\\') {
      result += '\\';
      result += each;
    } else if (each == '\n') {
      result += "\\n";
    } else if (byte < 0x20 || byte >= 0x7F) {
      std::array<char, 8> code;
      std::snprintf(code.data(), code.size(), "\\u%04x", byte);
      result += code.data();
    } else {
      result += each;
    }
  }
  return result + '"';
}

}  // namespace pydist::watchdog
