// The operations of a communicator, by calls of NCCL.
//
// `run` (communicator.cpp) orders each operation after the work on the caller's stream, and puts
// its calls into one group: they start together, so the order of sends and receives can't block.
// Slices of different sizes have no call of NCCL: each is a broadcast, or a reduction to its rank.
#include <algorithm>
#include <functional>
#include <numeric>

#include "comm/nccl/communicator.hpp"

namespace pydist::comm {
namespace {

bool equal(const std::vector<std::size_t>& counts) {
  return std::ranges::adjacent_find(counts, std::not_equal_to{}) == counts.end();
}

// Adds a message to the fingerprint of its peer's messages (FNV-1a, by words).
void note(std::vector<std::uint64_t>& prints, const DeviceMessage& message, int tag) {
  std::uint64_t& print = prints.at(static_cast<std::size_t>(message.peer));
  for (const auto word : {static_cast<std::uint64_t>(tag) + 1, std::uint64_t{message.bytes}}) {
    print = (print ^ word) * 0x100000001b3U;
  }
}

std::string of_bytes(const char* call, std::size_t bytes) {
  return std::string(call) + " of " + std::to_string(bytes) + " bytes";
}

}  // namespace

void NcclCommunicator::exchange(const std::vector<DeviceMessage>& sends,
                                const std::vector<DeviceMessage>& receives, int tag, void* caller,
                                const Done& done) {
  require_peers(sends, size_, "NCCL");  // before the group: a throw within it would leave it open
  require_peers(receives, size_, "NCCL");
  const auto what = [sends, receives] { return describe_exchange(sends, receives); };
  run(what, caller, done, [&] {
    NcclResult result = NcclResult::kSuccess;
    for (const DeviceMessage& each : sends) {
      if (each.bytes == 0 || !fine(result)) continue;
      note(sent_, each, tag);
      result = library_->send(each.address, each.bytes, NcclType::kUint8, each.peer, comm_,
                              stream_.handle());
    }
    for (const DeviceMessage& each : receives) {
      if (each.bytes == 0 || !fine(result)) continue;
      note(received_, each, tag);
      result = library_->recv(each.address, each.bytes, NcclType::kUint8, each.peer, comm_,
                              stream_.handle());
    }
    return result;
  });
}

void NcclCommunicator::broadcast(std::byte* address, std::size_t bytes, int root, void* caller,
                                 const Done& done) {
  const auto what = [bytes, root] {
    return of_bytes("broadcast", bytes) + " from rank " + std::to_string(root);
  };
  run(what, caller, done, [&] {
    return library_->broadcast(address, address, bytes, NcclType::kUint8, root, comm_,
                               stream_.handle());
  });
}

void NcclCommunicator::all_reduce(std::byte* address, std::size_t count, NcclType type, NcclOp op,
                                  void* caller, const Done& done) {
  const auto what = [count] { return "all-reduce of " + std::to_string(count) + " elements"; };
  run(what, caller, done, [&] {
    return library_->all_reduce(address, address, count, type, op, comm_, stream_.handle());
  });
}

void NcclCommunicator::all_gather(std::byte* row, const std::vector<std::size_t>& bytes,
                                  void* caller, const Done& done) {
  const std::size_t total = std::reduce(bytes.begin(), bytes.end());
  const auto what = [total] { return of_bytes("all-gather", total); };
  run(what, caller, done, [&] {
    if (equal(bytes)) {
      const std::size_t own = bytes[static_cast<std::size_t>(rank_)];
      return library_->all_gather(row + static_cast<std::size_t>(rank_) * own, row, own,
                                  NcclType::kUint8, comm_, stream_.handle());
    }
    NcclResult result = NcclResult::kSuccess;
    std::byte* slice = row;
    for (std::size_t root = 0; root < bytes.size() && fine(result); slice += bytes[root++]) {
      if (bytes[root] == 0) continue;
      result = library_->broadcast(slice, slice, bytes[root], NcclType::kUint8,
                                   static_cast<int>(root), comm_, stream_.handle());
    }
    return result;
  });
}

void NcclCommunicator::reduce_scatter(const std::byte* row, const std::vector<std::size_t>& counts,
                                      std::size_t element, NcclType type, std::byte* out,
                                      void* caller, const Done& done) {
  const std::size_t total = element * std::reduce(counts.begin(), counts.end());
  const auto what = [total] { return of_bytes("reduce-scatter", total); };
  run(what, caller, done, [&] {
    if (equal(counts)) {
      return library_->reduce_scatter(row, out, counts[0], type, NcclOp::kSum, comm_,
                                      stream_.handle());
    }
    NcclResult result = NcclResult::kSuccess;
    const std::byte* slice = row;
    for (std::size_t root = 0; root < counts.size() && fine(result);
         slice += element * counts[root++]) {
      if (counts[root] == 0) continue;
      result =
          library_->reduce(slice, static_cast<int>(root) == rank_ ? out : nullptr, counts[root],
                           type, NcclOp::kSum, static_cast<int>(root), comm_, stream_.handle());
    }
    return result;
  });
}

}  // namespace pydist::comm
