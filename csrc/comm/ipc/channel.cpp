// A channel's setup (offer, accept), and the round of channel.hpp that it puts on the stream.
#include "comm/ipc/channel.hpp"

#include <algorithm>

#include "core/errors.hpp"

namespace pydist::comm {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr Flag kNo = 0, kYes = 1;

std::size_t total(const IpcChannel::Messages& messages) {
  std::size_t bytes = 0;
  for (const DeviceMessage& each : messages) bytes += each.bytes;
  return bytes;
}

IpcAddress moved(IpcAddress place, std::size_t bytes) {
  place.offset += bytes;
  return place;
}

}  // namespace

// Sorts the messages by peer; messages of this rank to itself are copied directly. Receive memory
// is one piece, cut by peers.
IpcChannel::IpcChannel(std::shared_ptr<IpcGroup> group, const Messages& sends,
                       const Messages& receives)
    : group_(std::move(group)),
      done_(std::make_shared<Event>(group_->memory().context())),
      number_(group_->order().new_channel()) {
  require_peers(sends, group_->size(), "CUDA IPC");
  require_peers(receives, group_->size(), "CUDA IPC");
  for (const DeviceMessage& each : sends) {
    if (each.bytes > 0) peers_[each.peer].sends.push_back(each);
  }
  for (const DeviceMessage& each : receives) {
    if (each.bytes > 0) peers_[each.peer].receives.push_back(each);
  }
  if (auto self = peers_.extract(group_->rank())) {
    own_ = std::move(self.mapped());
    const bool match = std::ranges::equal(own_.sends, own_.receives, {}, &DeviceMessage::bytes,
                                          &DeviceMessage::bytes);
    PYDIST_EXPECT(match, "rank " + std::to_string(group_->rank()) + " sends itself " +
                             std::to_string(total(own_.sends)) + " bytes and expects " +
                             std::to_string(total(own_.receives)));
  }
  std::size_t bytes = 0, index = 0;
  for (auto& [rank, peer] : peers_) {
    peer.index = index++;
    peer.receive_offset = bytes;
    bytes += (total(peer.receives) + kAlignment - 1) / kAlignment * kAlignment;
  }
  IpcMemory& memory = group_->memory();
  if (!peers_.empty()) flags_ = memory.take_flags(2 * peers_.size(), group_->stream());
  if (bytes > 0) buffer_ = memory.take_buffer(bytes, group_->stream());
}

IpcChannel::~IpcChannel() {
  // A graph may replay rounds after their channel was destroyed.
  if (!captured_) group_->memory().recycle(flags_, buffer_, issued_ ? done_ : nullptr);
}

std::vector<int> IpcChannel::peers() const {
  std::vector<int> ranks;
  for (const auto& [rank, peer] : peers_) ranks.push_back(rank);
  return ranks;
}

IpcOffer IpcChannel::offer(int rank) const {
  const Peer& peer = peers_.at(rank);
  return {.ready = moved(flags_.place, 2 * peer.index * sizeof(Flag)),
          .filled = moved(flags_.place, (2 * peer.index + 1) * sizeof(Flag)),
          .receive = moved(buffer_.place, peer.receive_offset),
          .sent = peer.sends.size(),
          .sent_bytes = total(peer.sends),
          .received = peer.receives.size(),
          .received_bytes = total(peer.receives),
          .notes = group_->order().place(),
          .channel = number_};
}

// Compares the messages of both sides before any memory is mapped: a difference names both ranks.
void IpcChannel::accept(int rank, const IpcOffer& offer) {
  Peer& peer = peers_.at(rank);
  const auto text = [](std::size_t count, std::size_t bytes) {
    return std::to_string(bytes) + " bytes in " + std::to_string(count) + " messages";
  };
  const auto require = [&](int from, int to, std::size_t sent, std::size_t sent_bytes,
                           std::size_t expected, std::size_t expected_bytes) {
    PYDIST_EXPECT(sent == expected && sent_bytes == expected_bytes,
                  "rank " + std::to_string(from) + " sends " + text(sent, sent_bytes) +
                      " where rank " + std::to_string(to) + " expects " +
                      text(expected, expected_bytes));
  };
  const int self = group_->rank();
  peer.channel = static_cast<std::uint32_t>(offer.channel);
  group_->order().meet(rank, offer.notes);
  require(rank, self, offer.sent, offer.sent_bytes, peer.receives.size(), total(peer.receives));
  require(self, rank, peer.sends.size(), total(peer.sends), offer.received, offer.received_bytes);
  try {
    IpcMemory& memory = group_->memory();
    peer.ready = reinterpret_cast<Flag*>(memory.mapped(offer.ready));
    peer.filled = reinterpret_cast<Flag*>(memory.mapped(offer.filled));
    if (!peer.sends.empty()) peer.target = memory.mapped(offer.receive);
  } catch (const DriverError& error) {
    throw DriverError("CUDA IPC: rank " + std::to_string(self) + " can't map the memory of rank " +
                      std::to_string(rank) + ": " + error.what());
  }
}

void IpcChannel::start(void* caller) {
  group_->run([this] { return what(); }, [&] { group_->mark(caller); });
}

void IpcChannel::issue() {
  group_->run([this] { return what(); },
              [this] {
                require_order();
                group_->begin();
                put_round(group_->stream().handle());
                captured_ = captured_ || group_->stream().capturing();
                issued_ = true;
                done_->record(group_->stream().handle());
              });
}

void IpcChannel::wait(void* caller) {
  group_->run([this] { return what(); }, [&] { done_->delay(caller); });
}

void IpcChannel::require_order() {
  for (const auto& [rank, peer] : peers_) {
    if (group_->order().note(rank, number_, peer.channel)) continue;
    throw GroupError(GroupError::Fault::kUsage,
                     "rank " + std::to_string(rank) +
                         " has started another exchange with this rank in its place; all ranks"
                         " start their exchanges in one order");
  }
}

// The round of channel.hpp: ready flags, own copy, sends, receives. Peers in the order of ranks.
void IpcChannel::put_round(void* stream) {
  const IpcDriver& driver = group_->memory().driver();
  const bool flush = group_->memory().flushes();
  for (const auto& [rank, peer] : peers_) {
    if (!peer.receives.empty()) driver.set(peer.ready, kYes, stream);
  }
  for (std::size_t i = 0; i < own_.sends.size(); ++i) {
    const DeviceMessage& each = own_.sends[i];
    driver.copy(own_.receives[i].address, each.address, each.bytes, stream);
  }
  for (const auto& [rank, peer] : peers_) {
    if (peer.sends.empty()) continue;
    driver.await(ready_flag(peer), kYes, false, stream);
    driver.set(ready_flag(peer), kNo, stream);
    std::byte* to = peer.target;
    for (const DeviceMessage& each : peer.sends) {
      driver.copy(to, each.address, each.bytes, stream);
      to += each.bytes;
    }
    driver.set(peer.filled, kYes, stream);
  }
  for (const auto& [rank, peer] : peers_) {
    if (peer.receives.empty()) continue;
    driver.await(filled_flag(peer), kYes, flush, stream);
    driver.set(filled_flag(peer), kNo, stream);
    const std::byte* from = buffer_.address + peer.receive_offset;
    for (const DeviceMessage& each : peer.receives) {
      driver.copy(each.address, from, each.bytes, stream);
      from += each.bytes;
    }
  }
}

Flag* IpcChannel::ready_flag(const Peer& peer) const {
  return reinterpret_cast<Flag*>(flags_.address) + 2 * peer.index;
}

Flag* IpcChannel::filled_flag(const Peer& peer) const { return ready_flag(peer) + 1; }

std::string IpcChannel::what() const {
  Messages sends = own_.sends, receives = own_.receives;
  for (const auto& [rank, peer] : peers_) {
    sends.insert(sends.end(), peer.sends.begin(), peer.sends.end());
    receives.insert(receives.end(), peer.receives.begin(), peer.receives.end());
  }
  return describe_exchange(sends, receives);
}

}  // namespace pydist::comm
