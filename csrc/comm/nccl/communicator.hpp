// A group of ranks that NCCL connects, with the stream of its messages.
//
// Every operation is ordered only by events: it runs after the work on the caller's stream, and
// work that the caller puts on a stream after `wait` runs after it. The host waits for no device. A
// thread of NCCL puts each operation on the stream, and waits, the first time, for the ranks that
// it connects to. The host waits for this thread, with a time limit, not at the start of an
// operation but at its `wait`, or at the start of the group's next one: ranks may start operations
// of two groups in different orders.
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

// Time limits of the host's waits, in seconds.
struct NcclLimits {
  double connect;  // until all ranks have joined a new communicator
  double issue;    // until an operation is on the stream; the first time, ranks connect for it
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

  // Each (operations.cpp) starts one operation after the work on the stream `caller`; `done` comes
  // after it. Messages between two ranks match in the order in which both started them; a message
  // of 0 bytes is none. Empty slices are ignored.
  void exchange(const std::vector<DeviceMessage>& sends, const std::vector<DeviceMessage>& receives,
                int tag, void* caller, const Done& done);
  void broadcast(std::byte* address, std::size_t bytes, int root, void* caller, const Done& done);
  void all_reduce(std::byte* address, std::size_t count, NcclType type, NcclOp op, void* caller,
                  const Done& done);
  // `row` has a slice of bytes[r] from every rank r, one after the other; this rank's slice is
  // already filled.
  void all_gather(std::byte* row, const std::vector<std::size_t>& bytes, void* caller,
                  const Done& done);
  // `row` has a slice of counts[r] elements for every rank r; `out` gets the sum of this rank's.
  void reduce_scatter(const std::byte* row, const std::vector<std::size_t>& counts,
                      std::size_t element, NcclType type, std::byte* out, void* caller,
                      const Done& done);

  // Later work on the stream `caller` runs after `done`.
  void wait(const Done& done, void* caller);
  // Whether `done` is reached; also false during the capture of a graph, which forbids queries.
  bool reached(const Done& done);

  // For each rank a fingerprint of the messages sent to it (tags and sizes, in order), and one of
  // the messages received from it. If a rank starts its exchanges in another order than its peer,
  // messages of equal size are mixed silently; the fingerprints reveal it.
  std::vector<std::uint64_t> sent() const;
  std::vector<std::uint64_t> received() const;

  // Aborts operations in flight on this rank's device; later calls throw. From any thread.
  void abort();
  // Collective: waits for operations in flight, and closes. Idempotent. NCCL waits until CUDA
  // graphs with operations of the group are destroyed; after the limit `issue` an error says so.
  void close();

 private:
  using Describe = std::function<std::string()>;

  void run(Describe what, void* caller, const Done& done, const std::function<NcclResult()>& calls);
  // Waits until the operation started last is on the stream, and records its event after it.
  void issue();
  // `late`: the possible cause if that takes longer.
  void settle(NcclResult state, double seconds, const Describe& what,
              const char* late = "not all ranks have reached it");
  void require_sound(const Describe& what);
  [[noreturn]] void fail(NcclResult result, const std::string& what);
  [[noreturn]] void give_up(GroupError::Fault fault, const std::string& what);
  // Aborts the communicator, if it exists; waits for a hanging device with a limit.
  void end();

  std::shared_ptr<const NcclLibrary> library_;
  std::shared_ptr<const DeviceContext> context_;
  int rank_, size_;
  NcclLimits limits_;
  Stream stream_;
  Event ready_;  // one is enough: a waiting stream keeps the event's state at that time
  std::atomic<NcclComm*> comm_ = nullptr;
  std::atomic<bool> aborted_ = false;
  std::vector<std::uint64_t> sent_, received_;
  // The operation started last, which may not be on the stream yet.
  NcclResult state_ = NcclResult::kSuccess;
  Describe what_;
  Done done_;
  mutable std::mutex mutex_;  // autograd's threads and the caller's take turns
};

}  // namespace pydist::comm
