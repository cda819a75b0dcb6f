// A group of ranks that NCCL connects, with the stream on which its messages travel.
//
// Every operation is ordered by events alone: what is on the caller's stream comes before it, and
// what the caller puts on a stream after `wait` comes after it. The host waits for no device. NCCL
// leaves it to a thread of its own to put an operation on the stream, and that one waits, the first
// time, for the ranks that it connects to. So the host waits for that, with a time limit, not where
// an operation starts but where it is waited for, or where the next one of the group starts: ranks
// may start operations of two groups in different orders.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/driver/cuda_driver.hpp"
#include "comm/driver/device_message.hpp"
#include "comm/driver/group_error.hpp"
#include "comm/nccl/library.hpp"

namespace pydist::comm {

// How long the host may wait, in seconds.
struct NcclLimits {
  double connect;  // for all ranks to have come to a new communicator
  double issue;    // for an operation to be put on the stream: at first, ranks connect for it
};

class NcclCommunicator {
 public:
  using Done = std::shared_ptr<Event>;

  // Collective; `id` comes from one rank. Rank `rank` of `size` works on CUDA device `device`.
  NcclCommunicator(std::shared_ptr<const NcclLibrary> library,
                   std::shared_ptr<const CudaDriver> driver, const NcclUniqueId& id, int rank,
                   int size, int device, NcclLimits limits);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int size() const { return size_; }
  const std::shared_ptr<const DeviceContext>& context() const { return context_; }
  void* stream() const { return stream_.handle(); }

  // Each (operations.cpp) starts one operation after what is on the stream `caller`; `done` comes
  // after it. Messages between two ranks match in the order in which both started them; a message
  // of 0 bytes is none. Empty slices take part in nothing.
  void exchange(const std::vector<DeviceMessage>& sends, const std::vector<DeviceMessage>& receives,
                int tag, void* caller, const Done& done);
  void broadcast(std::byte* address, std::size_t bytes, int root, void* caller, const Done& done);
  void all_reduce(std::byte* address, std::size_t count, NcclType type, NcclOp op, void* caller,
                  const Done& done);
  // `row` has a slice of bytes[r] from every rank r, one after the other; that of this one is
  // there.
  void all_gather(std::byte* row, const std::vector<std::size_t>& bytes, void* caller,
                  const Done& done);
  // `row` has a slice of counts[r] elements for every rank r; `out` gets the sum of this rank's.
  void reduce_scatter(const std::byte* row, const std::vector<std::size_t>& counts,
                      std::size_t element, NcclType type, std::byte* out, void* caller,
                      const Done& done);

  // What is put on the stream `caller` from now on comes after `done`.
  void wait(const Done& done, void* caller);
  // Whether `done` is reached; false as well while a graph is captured, which nobody may ask.
  bool reached(const Done& done);

  // For each rank a fingerprint of the messages that went there, tags and sizes in their order, and
  // one of those that came from there. If one rank has started its exchanges in another order than
  // its peer, messages of equal size went wrong unseen, and here it shows.
  std::vector<std::uint64_t> sent() const;
  std::vector<std::uint64_t> received() const;

  // Ends what is under way on this rank's device; later calls throw. From any thread.
  void abort();
  // Collective: waits for what is under way on the device, and lets go. Idempotent. NCCL waits for
  // CUDA graphs with operations of the group to be gone; after the limit for `issue` that is said.
  void close();

 private:
  using Describe = std::function<std::string()>;

  void run(Describe what, void* caller, const Done& done, const std::function<NcclResult()>& calls);
  // Waits until what was started last is on the stream, and puts its event behind it.
  void issue();
  // `late`: what it may be if that takes longer.
  void settle(NcclResult state, double seconds, const Describe& what,
              const char* late = "not all ranks have come to it");
  void require_sound(const Describe& what);
  [[noreturn]] void fail(NcclResult result, const std::string& what);
  [[noreturn]] void give_up(GroupError::Fault fault, const std::string& what);
  // Aborts the communicator, if there is one; a device that hangs is waited for with a limit.
  void end();

  std::shared_ptr<const NcclLibrary> library_;
  std::shared_ptr<const DeviceContext> context_;
  int rank_, size_;
  NcclLimits limits_;
  Stream stream_;
  Event ready_;  // one will do: a stream that waits for it keeps what it was at that time
  std::atomic<NcclComm*> comm_ = nullptr;
  std::atomic<bool> aborted_ = false;
  std::vector<std::uint64_t> sent_, received_;
  // What was started last, and may not be on the stream yet.
  NcclResult state_ = NcclResult::kSuccess;
  Describe what_;
  Done done_;
  mutable std::mutex mutex_;  // autograd's threads and the caller's take turns
};

}  // namespace pydist::comm
