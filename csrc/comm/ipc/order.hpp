// Detects, on the hosts, that two ranks start their exchanges in different orders.
//
// On the devices such ranks would wait for each other forever. So a rank notes in shared memory,
// which its peers read, the channel of its n-th exchange with each peer. It writes first and then
// reads: of two ranks, the one that reaches the n-th exchange second sees the other's channel. No
// host waits, and no message is sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace pydist::comm {

// The location of a rank's notes, for other processes.
struct IpcNotesFile {
  std::int32_t process = 0, file = -1;  // -1: no notes
  std::uint64_t key = 0;                // at the beginning of the notes
};

class IpcOrder {
 public:
  // Notes kept per peer: no rank is that far ahead of another, as its stream accepts no more rounds
  // before the other one has started the first.
  static constexpr std::uint32_t kKept = 1024;

  IpcOrder(int rank, int size);
  ~IpcOrder();
  IpcOrder(const IpcOrder&) = delete;
  IpcOrder& operator=(const IpcOrder&) = delete;

  const IpcNotesFile& place() const { return place_; }
  // A number for a new channel.
  std::uint32_t new_channel();
  // Maps a peer's notes; notes that can't be read are not compared. Further calls do nothing.
  void meet(int peer, const IpcNotesFile& place);
  // Notes that this rank starts its channel `own` with a peer. False if the peer is known to have
  // started another channel than `other` (its number for the same channel) at that position.
  bool note(int peer, std::uint32_t own, std::uint32_t other);

 private:
  std::size_t bytes() const;

  std::size_t rank_, size_;
  IpcNotesFile place_;
  std::uint64_t* notes_ = nullptr;  // a key, then a row of kKept for each peer
  std::map<int, const std::uint64_t*> of_peers_;
  std::map<int, std::uint32_t> started_;  // with each peer
  std::uint32_t channels_ = 0;
  std::mutex mutex_;
};

}  // namespace pydist::comm
