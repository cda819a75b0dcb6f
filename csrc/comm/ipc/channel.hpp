// A repeated exchange between ranks that write into each other's memory.
//
// Each rank has, for every peer, two flags in memory of its own device, both zero between rounds:
// `ready` (the peer can receive) and `filled` (the peer's message has arrived). A round on the
// stream of a rank:
//
//   after all work on the caller's stream at the start
//   for each sender:    set its `ready`
//   for each receiver:  await own `ready`, clear it; copy into its memory; set its `filled`
//   for each sender:    await own `filled`, clear it; copy from the receive memory to the buffers
//   the event for which the caller's stream waits
//
// So nothing is written before the receiver is done with the previous content, nothing is read
// before it has arrived, and no host waits. All flags have the same values in every round: a graph
// can replay a captured round. A rank sets flags of others and waits for its own, as a stream can
// wait only for memory of its own device. Ranks start the exchanges of a group in one order; if two
// do not, one of them is refused (order.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/driver/device_message.hpp"
#include "comm/ipc/group.hpp"

namespace pydist::comm {

// A rank's offer to a peer of a channel, sent once.
struct IpcOffer {
  IpcAddress ready;    // set by the peer when it can receive
  IpcAddress filled;   // set by the peer when it has sent
  IpcAddress receive;  // for the peer's messages, one after the other
  std::uint64_t sent = 0, sent_bytes = 0, received = 0, received_bytes = 0;  // with that peer
  IpcNotesFile notes;         // the order in which this rank starts its exchanges
  std::uint64_t channel = 0;  // the number of this channel in the notes
};

class IpcChannel {
 public:
  using Messages = std::vector<DeviceMessage>;

  // Messages between two ranks match in the order of the lists; one of 0 bytes is none. The
  // buffers are used until the channel is closed.
  IpcChannel(std::shared_ptr<IpcGroup> group, const Messages& sends, const Messages& receives);
  ~IpcChannel();
  IpcChannel(const IpcChannel&) = delete;
  IpcChannel& operator=(const IpcChannel&) = delete;

  // The other ranks that exchange messages with this one; each receives an offer and makes one.
  std::vector<int> peers() const;
  IpcOffer offer(int peer) const;
  void accept(int peer, const IpcOffer& offer);

  // A round: `start` marks its beginning on the stream `caller`, `issue` puts it on the group's
  // stream, after all peers' offers have arrived, and `wait` makes `caller` wait for it.
  void start(void* caller);
  void issue();
  void wait(void* caller);

 private:
  struct Peer {
    Messages sends, receives;
    std::size_t index = 0;                     // of its flags
    std::size_t receive_offset = 0;            // of its messages in this rank's receive memory
    Flag *ready = nullptr, *filled = nullptr;  // its flags
    std::byte* target = nullptr;               // its receive memory for this rank
    std::uint32_t channel = 0;                 // its number for this channel
  };

  Flag* ready_flag(const Peer& peer) const;
  Flag* filled_flag(const Peer& peer) const;
  void require_order();
  void put_round(void* stream);
  std::string what() const;

  std::shared_ptr<IpcGroup> group_;
  std::map<int, Peer> peers_;
  Peer own_;  // messages of this rank to itself, which need no flags
  IpcAllocation flags_, buffer_;
  std::shared_ptr<Event> done_;
  std::uint32_t number_;  // among the channels of this rank
  bool issued_ = false, captured_ = false;
};

}  // namespace pydist::comm
