// Rank-threads of one process: mailboxes for messages, and collectives whose work the last rank to
// arrive does for all. One mutex guards the hub; the work of a collective runs without it.
#include "comm/local/hub.hpp"

#include <cstring>
#include <utility>

#include "core/errors.hpp"

namespace pydist::comm {
namespace {

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

// The work of an exchange: copies each rank's messages into the memory of their receivers.
void exchange(std::vector<std::vector<Segment>>& inputs,
              std::vector<std::vector<Segment>>& outputs) {
  for (std::size_t source = 0; source < inputs.size(); ++source) {
    for (std::size_t dest = 0; dest < outputs.size(); ++dest) {
      const Segment& from = inputs[source][dest];
      const Segment& to = outputs[dest][source];
      PYDIST_EXPECT(from.bytes == to.bytes, "rank " + std::to_string(source) + " sends " +
                                                std::to_string(from.bytes) + " bytes to rank " +
                                                std::to_string(dest) + ", which expects " +
                                                std::to_string(to.bytes));
      if (from.bytes > 0) std::memcpy(to.data, from.data, from.bytes);
    }
  }
}

}  // namespace

LocalHub::LocalHub(int size) {
  PYDIST_EXPECT(size >= 1, "a hub needs at least 1 rank, got " + std::to_string(size));
  auto world = std::make_unique<Members>();
  for (int rank = 0; rank < size; ++rank) {
    ranks_.push_back(std::make_unique<Rank>());
    world->world.push_back(rank);
  }
  world->next.assign(static_cast<std::size_t>(size), 0);
  groups_.push_back(std::move(world));
}

// All members request a group with the same key; the first one makes it.
LocalHub::Group LocalHub::subgroup(Group parent, std::uint64_t sequence,
                                   const std::vector<int>& members_of_parent) {
  const Lock lock(mutex_);
  check_alive();
  const auto [entry, is_new] = subgroups_.try_emplace({parent, sequence, members_of_parent},
                                                      static_cast<Group>(groups_.size()));
  if (is_new) {
    auto group = std::make_unique<Members>();
    for (const int rank : members_of_parent) {
      group->world.push_back(members(parent).world.at(static_cast<std::size_t>(rank)));
    }
    group->next.assign(members_of_parent.size(), 0);
    groups_.push_back(std::move(group));
  }
  return entry->second;
}

void LocalHub::send(Group group, int rank, int dest, int tag, Segment segment) {
  Bytes bytes(segment.data, segment.data + segment.bytes);
  const Lock lock(mutex_);
  check_alive();
  Rank& receiver = world_rank(group, dest);
  receiver.mailboxes[{group, rank, tag}].push_back(std::move(bytes));
  receiver.changed.notify_all();
}

void LocalHub::receive(Group group, int rank, int source, int tag, Segment segment) {
  Lock lock(mutex_);
  Rank& self = world_rank(group, rank);
  std::deque<Bytes>& mailbox = self.mailboxes[{group, source, tag}];
  const auto what = [&] {
    return "receives " + std::to_string(segment.bytes) + " bytes from rank " +
           std::to_string(source) + ", tag " + std::to_string(tag) + ", of the group of ranks " +
           list(members(group).world);
  };
  wait(lock, self, {[&] { return !mailbox.empty(); }, what});
  const Bytes bytes = std::move(mailbox.front());
  mailbox.pop_front();
  lock.unlock();
  PYDIST_EXPECT(bytes.size() == segment.bytes,
                "rank " + std::to_string(rank) + " expects " + std::to_string(segment.bytes) +
                    " bytes from rank " + std::to_string(source) + ", tag " + std::to_string(tag) +
                    ", and got " + std::to_string(bytes.size()));
  if (!bytes.empty()) std::memcpy(segment.data, bytes.data(), bytes.size());
}

LocalHub::Ticket LocalHub::start_exchange(Group group, int rank, std::vector<Segment> inputs,
                                          std::vector<Segment> outputs) {
  return start(group, rank, "exchange", std::move(inputs), std::move(outputs),
               [](Collective& self) { exchange(self.inputs, self.outputs); });
}

LocalHub::Ticket LocalHub::start_all_reduce(Group group, int rank, std::byte* data,
                                            std::size_t count, DType dtype, ReduceOp op) {
  std::string signature = "all_reduce of " + std::to_string(count) + " elements of " +
                          std::string(name_of(dtype)) + ", op " + std::string(name_of(op));
  const auto work = [=](Collective& self) {
    std::vector<std::byte*> pointers;
    for (const auto& segments : self.outputs) pointers.push_back(segments.front().data);
    reduce({const_cast<const std::byte* const*>(pointers.data()), pointers.size()}, pointers, count,
           dtype, op);
  };
  return start(group, rank, std::move(signature), {},
               {{data, count * static_cast<std::size_t>(size_of(dtype))}}, work);
}

// Registers a rank's buffers with the collective of its ticket. Ranks number their collectives in
// the order in which they start them; different collectives under the same ticket are an error for
// all ranks. The rank that arrives last does the work.
LocalHub::Ticket LocalHub::start(Group group, int rank, std::string signature,
                                 std::vector<Segment> inputs, std::vector<Segment> outputs,
                                 std::function<void(Collective&)> work) {
  Lock lock(mutex_);
  check_alive();
  Members& ranks = members(group);
  const std::size_t count = ranks.world.size();
  const auto me = static_cast<std::size_t>(rank);
  const Ticket ticket = ranks.next[me]++;
  std::shared_ptr<Collective>& entry = ranks.open[ticket];
  if (!entry) {
    entry = std::make_shared<Collective>();
    entry->signature = std::move(signature);
    entry->first = rank;
    entry->missing = entry->unfinished = static_cast<int>(count);
    entry->arrived.assign(count, 0);
    entry->inputs.resize(count);
    entry->outputs.resize(count);
    entry->work = std::move(work);
  } else if (entry->signature != signature && entry->error.empty()) {
    entry->error = "collective " + std::to_string(ticket) + " of the group of ranks " +
                   list(ranks.world) + " differs: rank " + std::to_string(entry->first) +
                   " called " + entry->signature + ", rank " + std::to_string(rank) + " called " +
                   signature;
  }
  const std::shared_ptr<Collective> collective = entry;
  collective->inputs[me] = std::move(inputs);
  collective->outputs[me] = std::move(outputs);
  collective->arrived[me] = 1;
  if (--collective->missing == 0) complete(lock, group, *collective);
  return ticket;
}

void LocalHub::complete(Lock& lock, Group group, Collective& collective) {
  if (collective.error.empty()) {
    collective.state = State::kRunning;
    ++running_;
    lock.unlock();
    std::string error;
    try {
      collective.work(collective);
    } catch (const std::exception& failure) {
      error = failure.what();
    }
    lock.lock();
    collective.error = std::move(error);
    if (--running_ == 0) idle_.notify_all();
  }
  collective.state = State::kDone;
  for (const int rank : members(group).world) {
    ranks_[static_cast<std::size_t>(rank)]->changed.notify_all();
  }
}

// Waits until the collective is done, and deletes it after its last member has returned.
void LocalHub::finish(Group group, int rank, Ticket ticket) {
  Lock lock(mutex_);
  Members& ranks = members(group);
  const auto entry = ranks.open.find(ticket);
  PYDIST_EXPECT(entry != ranks.open.end(), "collective " + std::to_string(ticket) +
                                               " was never started or is finished already");
  const std::shared_ptr<Collective> collective = entry->second;
  const auto what = [&] {
    return collective->signature + " (collective " + std::to_string(ticket) +
           " of the group of ranks " + list(ranks.world) + "), still without " +
           waiting_for(group, *collective);
  };
  wait(lock, world_rank(group, rank), {[&] { return collective->state == State::kDone; }, what});
  if (--collective->unfinished == 0) ranks.open.erase(ticket);
  if (!collective->error.empty()) throw UsageError(collective->error);
}

void LocalHub::abort(const std::string& reason) {
  Lock lock(mutex_);
  if (aborted_.empty()) aborted_ = reason.empty() ? "aborted" : reason;
  for (const auto& rank : ranks_) rank->changed.notify_all();
  idle_.wait(lock, [&] { return running_ == 0; });
}

void LocalHub::leave(int rank) {
  const Lock lock(mutex_);
  ranks_.at(static_cast<std::size_t>(rank))->left = true;
  check_progress();
}

// Registers what a rank waits for, so that check_progress can detect a deadlock, and sleeps.
void LocalHub::wait(Lock& lock, Rank& self, Wait wait) {
  self.wait = &wait;
  check_progress();
  // While a collective runs, another thread uses its buffers: no unwinding before its end.
  self.changed.wait(lock, [&] { return wait.over() || !aborted_.empty(); });
  self.wait = nullptr;
  if (wait.over()) return;
  idle_.wait(lock, [&] { return running_ == 0; });
  check_alive();
}

void LocalHub::check_alive() const {
  if (aborted_.empty()) return;
  if (deadlocked_) throw Deadlock(aborted_);
  throw Aborted(aborted_);
}

// Called when a rank begins to wait or leaves: if no rank can run, none ever will.
void LocalHub::check_progress() {
  if (!aborted_.empty()) return;
  bool anyone_left_over = false;
  for (const auto& rank : ranks_) {
    if (rank->left) continue;
    if (rank->wait == nullptr || rank->wait->over()) return;
    anyone_left_over = true;
  }
  if (!anyone_left_over) return;
  std::string report = "deadlock, no rank can go on";
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    report += "; rank " + std::to_string(rank) + ": " +
              (ranks_[rank]->left ? "has ended" : ranks_[rank]->wait->what());
  }
  deadlocked_ = true;
  aborted_ = std::move(report);
  for (const auto& rank : ranks_) rank->changed.notify_all();
}

std::string LocalHub::waiting_for(Group group, const Collective& collective) const {
  std::vector<int> absent;
  for (std::size_t rank = 0; rank < collective.arrived.size(); ++rank) {
    if (!collective.arrived[rank]) {
      absent.push_back(groups_[static_cast<std::size_t>(group)]->world[rank]);
    }
  }
  return (absent.size() == 1 ? "rank " : "ranks ") + list(absent);
}

LocalChannel::LocalChannel(std::shared_ptr<LocalHub> hub, LocalHub::Group group, int rank,
                           std::vector<PeerSegment> sends, std::vector<PeerSegment> receives,
                           int tag)
    : hub_(std::move(hub)),
      group_(group),
      rank_(rank),
      tag_(tag),
      sends_(std::move(sends)),
      receives_(std::move(receives)) {}

void LocalChannel::start() {
  for (const PeerSegment& each : sends_) hub_->send(group_, rank_, each.peer, tag_, each.segment);
}

void LocalChannel::wait() {
  for (const PeerSegment& each : receives_) {
    hub_->receive(group_, rank_, each.peer, tag_, each.segment);
  }
}

}  // namespace pydist::comm
