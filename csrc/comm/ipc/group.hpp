// The ranks of a group that write into each other's memory, and this rank's stream for it.
//
// Streams of two groups may share a queue of the device, and then wait for each other: ranks that
// start exchanges of two groups in different orders need a queue for each stream
// (CUDA_DEVICE_MAX_CONNECTIONS). pydist does so only for gradients, which NCCL exchanges.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "comm/driver/group_error.hpp"
#include "comm/ipc/memory.hpp"
#include "comm/ipc/order.hpp"

namespace pydist::comm {

class IpcGroup {
 public:
  IpcGroup(std::shared_ptr<IpcMemory> memory, int rank, int size);

  int rank() const { return rank_; }
  int size() const { return size_; }
  IpcMemory& memory() const { return *memory_; }
  const Stream& stream() const { return stream_; }
  IpcOrder& order() { return order_; }

  // Runs calls that put work on streams, one at a time, with the context current, as autograd's
  // threads and the caller's take turns. A failure of the driver, or of other ranks, ends the
  // group, as its stream may have half of an exchange; `what` names the operation.
  void run(const std::function<std::string()>& what, const std::function<void()>& calls);

  // Work on `caller` so far precedes work on this stream after `begin`.
  void mark(void* caller) { ready_.record(caller); }
  void begin() { ready_.delay(stream_.handle()); }

  // Waits until the device has done all started work; GroupError after a time limit.
  void rest(double seconds);

 private:
  std::string named(const std::string& what) const;

  std::shared_ptr<IpcMemory> memory_;
  int rank_, size_;
  Stream stream_;
  Event ready_;  // one is enough: a marked round has begun before the next is marked
  IpcOrder order_;
  bool ended_ = false;
  std::mutex mutex_;
};

}  // namespace pydist::comm
