// Notices, on the hosts, that two ranks start their exchanges in different orders.
//
// On the devices such ranks wait for each other for good. So a rank notes in memory of the machine,
// which its peers read, with which channel it has started its n-th exchange with each peer. It
// notes first and looks then: of two ranks, the one that comes second to the n-th sees what the
// other has started. No host waits, and no message is sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace pydist::comm {

// Where the notes of a rank are, as other processes find them.
struct IpcNotesPlace {
  std::int32_t process = 0, file = -1;  // -1: there are none
  std::uint64_t key = 0;                // what the notes begin with
};

class IpcOrder {
 public:
  // Of a rank of `size`, the last that are kept of each peer: no rank is that far ahead of another,
  // as its stream takes no more before the other one has started the first.
  static constexpr std::uint32_t kKept = 1024;

  IpcOrder(int rank, int size);
  ~IpcOrder();
  IpcOrder(const IpcOrder&) = delete;
  IpcOrder& operator=(const IpcOrder&) = delete;

  const IpcNotesPlace& place() const { return place_; }
  // A number for a channel that is new.
  std::uint32_t new_channel();
  // Where a peer's notes are; what can't be read is not compared. Called again, it does nothing.
  void meet(int peer, const IpcNotesPlace& place);
  // This rank starts its channel `own` with a peer. False if the peer is known to have started
  // another one than `other` (its number for the same channel) at that place of the order.
  bool note(int peer, std::uint32_t own, std::uint32_t other);

 private:
  std::size_t bytes() const;

  std::size_t rank_, size_;
  IpcNotesPlace place_;
  std::uint64_t* notes_ = nullptr;  // a key, then a row of kKept for each peer
  std::map<int, const std::uint64_t*> of_peers_;
  std::map<int, std::uint32_t> started_;  // with each peer
  std::uint32_t channels_ = 0;
  std::mutex mutex_;
};

}  // namespace pydist::comm
