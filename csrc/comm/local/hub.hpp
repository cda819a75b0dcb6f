// Ranks that are threads of one process: mailboxes and collectives between them.
//
// A send copies its bytes into the receiver's mailbox and returns. A collective is a record that
// collects each rank's buffers; the rank that arrives last does all the work on them while the
// others wait, so no rank ever waits for a second rendezvous and waits may come in any order.
//
// The hub detects that every rank waits for something that can no longer arrive, and then ends the
// job with a message that says which rank waits for what, instead of hanging.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "comm/local/reduce.hpp"

namespace pydist::comm {

// Another rank failed, so this call can't complete. Python sees RankFailed.
class Aborted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Every rank waits, or the awaited one has ended. Python sees RankLost.
class Deadlock : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A buffer that a rank lends to a collective; null if that pair of ranks has none.
struct Segment {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

// One message of a channel.
struct PeerSegment {
  int peer = 0;
  Segment segment;
};

// All methods may be called from any thread; `rank` is the index of the calling rank in `group`.
// Each rank calls from one thread at a time. Buffers are borrowed until the call, or for the
// collectives `finish`, has returned or thrown.
class LocalHub {
 public:
  using Group = int;             // number of a group, for all of its members
  using Ticket = std::uint64_t;  // number of a collective within its group, from 0
  static constexpr Group kWorld = 0;

  explicit LocalHub(int size);

  int size() const { return static_cast<int>(ranks_.size()); }

  // The group of `members` (ranks of `parent`, in order). All members pass the same `sequence`,
  // the number of earlier splits of `parent`, and get the same group.
  Group subgroup(Group parent, std::uint64_t sequence, const std::vector<int>& members);

  // Copies the message, so the buffer is free afterwards, and does not wait.
  void send(Group group, int rank, int dest, int tag, Segment segment);

  // Waits for the next message of `source` with this tag: those of one source and tag arrive in the
  // order in which they were sent. Throws UsageError, and drops the message, if it has another
  // size.
  void receive(Group group, int rank, int source, int tag, Segment segment);

  // Every rank sends inputs[r] to rank r and receives outputs[r] from it: one segment per rank of
  // the group, of the same size on both sides; a null segment has 0 bytes. Gather, scatter,
  // broadcast, all-gather and barrier are special cases.
  Ticket start_exchange(Group group, int rank, std::vector<Segment> inputs,
                        std::vector<Segment> outputs);

  // In place: the ranks' `count` elements at `data` become their reduction, in the order of ranks,
  // so its bits are the same on all of them (reduce.hpp). All ranks must pass equal count, dtype
  // and op.
  Ticket start_all_reduce(Group group, int rank, std::byte* data, std::size_t count, DType dtype,
                          ReduceOp op);

  // Blocks until the collective is complete. Call once per ticket. Throws UsageError on every rank
  // if the ranks' calls under this ticket, or the sizes of their messages, differ.
  void finish(Group group, int rank, Ticket ticket);

  // Makes every blocked and every later call throw Aborted, except for those whose message or
  // result is there already. Returns when no rank uses another one's buffers any longer. The first
  // reason is kept; after a deadlock the calls throw Deadlock.
  void abort(const std::string& reason);

  // This rank (of kWorld) will make no more calls.
  void leave(int rank);

 private:
  using Bytes = std::vector<std::byte>;
  using MailboxKey = std::tuple<Group, int, int>;  // group, source, tag

  struct Wait {
    std::function<bool()> over;         // evaluated under the mutex
    std::function<std::string()> what;  // for the message
  };
  struct Rank {
    std::condition_variable changed;
    std::map<MailboxKey, std::deque<Bytes>> mailboxes;
    Wait* wait = nullptr;
    bool left = false;
  };
  enum class State : std::uint8_t { kGathering, kRunning, kDone };
  struct Collective {
    std::string signature;  // the first rank's call; the others must agree
    int first = -1;
    State state = State::kGathering;
    std::string error;
    std::vector<char> arrived;
    std::vector<std::vector<Segment>> inputs, outputs;
    int missing = 0, unfinished = 0;
    std::function<void(Collective&)> work;
  };
  struct Members {
    std::vector<int> world;  // ranks of kWorld
    std::vector<Ticket> next;
    std::map<Ticket, std::shared_ptr<Collective>> open;
  };
  using Lock = std::unique_lock<std::mutex>;

  Members& members(Group group) { return *groups_[static_cast<std::size_t>(group)]; }
  Rank& world_rank(Group group, int rank) {
    return *ranks_[static_cast<std::size_t>(members(group).world[static_cast<std::size_t>(rank)])];
  }
  Ticket start(Group group, int rank, std::string signature, std::vector<Segment> inputs,
               std::vector<Segment> outputs, std::function<void(Collective&)> work);
  void complete(Lock& lock, Group group, Collective& collective);
  void wait(Lock& lock, Rank& self, Wait wait);
  void check_alive() const;
  void check_progress();
  std::string waiting_for(Group group, const Collective& collective) const;

  mutable std::mutex mutex_;
  std::condition_variable idle_;  // running_ became 0
  int running_ = 0;               // collectives being worked on, outside the mutex
  std::string aborted_;
  bool deadlocked_ = false;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::unique_ptr<Members>> groups_;
  std::map<std::tuple<Group, std::uint64_t, std::vector<int>>, Group> subgroups_;
};

// Repeated messages with fixed peers and buffers. The buffers belong to the caller, who keeps them
// alive. Call start and wait in turns, on the rank's thread.
class LocalChannel {
 public:
  LocalChannel(std::shared_ptr<LocalHub> hub, LocalHub::Group group, int rank,
               std::vector<PeerSegment> sends, std::vector<PeerSegment> receives, int tag);

  // Copies and sends all messages; the buffers of sends are free afterwards.
  void start();
  // Receives all messages into their buffers.
  void wait();

 private:
  std::shared_ptr<LocalHub> hub_;
  LocalHub::Group group_;
  int rank_, tag_;
  std::vector<PeerSegment> sends_, receives_;
};

}  // namespace pydist::comm
