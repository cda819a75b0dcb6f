// An exchange that is repeated between ranks that write into each other's memory.
//
// Each rank has, for every peer, two flags in memory of its own device, both zero between rounds:
// `ready` (the peer can take what is sent to it) and `filled` (what the peer has sent is there). A
// round on the stream of a rank:
//
//   after what was on the caller's stream at the start
//   for each sender:    set its `ready`
//   for each receiver:  await own `ready`, clear it; copy into its memory; set its `filled`
//   for each sender:    await own `filled`, clear it; copy from the receive memory to the buffers
//   the event for which the caller's stream waits
//
// So nothing is written before its receiver is done with what was there, nothing is read before it
// is there, and no host waits. All flags have the same values in every round: a round that a graph
// holds can be replayed. A rank sets flags of others and waits for its own, as a stream waits for
// memory of its own device alone. Ranks start the exchanges of a group in one order; where two do
// not, one of them is refused (order.hpp).
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

// What a rank tells a peer of a channel, once.
struct IpcOffer {
  IpcPlace ready;    // to be set by the peer when it can take what this rank sends
  IpcPlace filled;   // to be set by the peer when it has sent
  IpcPlace receive;  // where what the peer sends goes, message after message
  std::uint64_t sent = 0, sent_bytes = 0, received = 0, received_bytes = 0;  // with that peer
  IpcNotesPlace notes;        // in which order this rank starts its exchanges
  std::uint64_t channel = 0;  // the number of this one there
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

  // The other ranks with which there are messages; each gets an offer and gives one.
  std::vector<int> peers() const;
  IpcOffer offer(int peer) const;
  void accept(int peer, const IpcOffer& offer);

  // A round: `start` marks where it begins on the stream `caller`, `issue` puts it on the group's
  // stream, once all peers' offers are there, and `wait` lets `caller` wait for it.
  void start(void* caller);
  void issue();
  void wait(void* caller);

 private:
  struct Peer {
    Messages sends, receives;
    std::size_t index = 0;           // which of the flags are for it
    std::size_t receive_offset = 0;  // where its messages go in this rank's receive memory
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
  Peer own_;  // messages of this rank to itself, which take no flags
  IpcPiece flags_, buffer_;
  std::shared_ptr<Event> done_;
  std::uint32_t number_;  // among the channels of this rank
  bool issued_ = false, captured_ = false;
};

}  // namespace pydist::comm
