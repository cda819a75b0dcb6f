#include "comm/nccl_communicator.hpp"

#include <algorithm>
#include <chrono>
#include <future>
#include <numeric>
#include <thread>
#include <utility>

#include "core/errors.hpp"

namespace pydist::comm {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr std::size_t kNamedMessages = 4;
constexpr auto kAbortLimit = std::chrono::seconds(2);

bool fine(NcclResult result) {
  return result == NcclResult::kSuccess || result == NcclResult::kInProgress;
}

bool equal(const std::vector<std::size_t>& counts) {
  return std::ranges::adjacent_find(counts, std::not_equal_to{}) == counts.end();
}

NcclError::Fault fault_of(NcclResult result) {
  switch (result) {
    case NcclResult::kInvalidArgument:
    case NcclResult::kInvalidUsage:
      return NcclError::Fault::kUsage;
    case NcclResult::kRemoteError:
    case NcclResult::kSystemError:  // a connection that broke is one
      return NcclError::Fault::kOtherRank;
    default:
      return NcclError::Fault::kLibrary;
  }
}

std::string list(const char* direction, const std::vector<NcclMessage>& messages) {
  std::string text;
  for (std::size_t i = 0; i < std::min(messages.size(), kNamedMessages); ++i) {
    text += std::string(i == 0 ? "" : ", ") + direction + std::to_string(messages[i].peer) + " " +
            std::to_string(messages[i].bytes) + " bytes";
  }
  if (messages.size() > kNamedMessages) {
    text += ", and " + std::to_string(messages.size() - kNamedMessages) + " more";
  }
  return text;
}

// Takes a message up into the fingerprint of those with its peer (FNV-1a, by words).
void note(std::vector<std::uint64_t>& prints, const NcclMessage& message, int tag) {
  std::uint64_t& print = prints.at(static_cast<std::size_t>(message.peer));
  for (const auto word : {static_cast<std::uint64_t>(tag) + 1, std::uint64_t{message.bytes}}) {
    print = (print ^ word) * 0x100000001b3U;
  }
}

void require_peers(const std::vector<NcclMessage>& messages, int size) {
  for (const NcclMessage& each : messages) {
    PYDIST_EXPECT(each.peer >= 0 && each.peer < size, "NCCL: rank " + std::to_string(each.peer) +
                                                          " is none of " + std::to_string(size));
  }
}

std::string of_bytes(const char* call, std::size_t bytes) {
  return std::string(call) + " of " + std::to_string(bytes) + " bytes";
}

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<const NcclLibrary> library,
                                   std::shared_ptr<const CudaDriver> driver, const NcclUniqueId& id,
                                   int rank, int size, int device, NcclLimits limits)
    : library_(std::move(library)),
      context_(std::make_shared<DeviceContext>(std::move(driver), device)),
      rank_(rank),
      size_(size),
      limits_(limits),
      stream_(context_),
      ready_(context_),
      sent_(static_cast<std::size_t>(size)),
      received_(static_cast<std::size_t>(size)) {
  const DeviceContext::Current current(*context_);
  NcclConfig config;
  NcclComm* comm = nullptr;
  const NcclResult state = library_->comm_init_rank_config(&comm, size, id, rank, &config);
  comm_ = comm;
  settle(state, limits_.connect, [&] {
    return "connecting " + std::to_string(size_) + " ranks on CUDA device " +
           std::to_string(device);
  });
}

NcclCommunicator::~NcclCommunicator() { abort(); }

void NcclCommunicator::exchange(const std::vector<NcclMessage>& sends,
                                const std::vector<NcclMessage>& receives, int tag, void* caller,
                                const Done& done) {
  require_peers(sends, size_);  // here: what throws within a group of NCCL leaves it open
  require_peers(receives, size_);
  const auto what = [sends, receives] {
    const char* between = sends.empty() || receives.empty() ? "" : "; ";
    return "exchange (" + list("to rank ", sends) + between + list("from rank ", receives) + ")";
  };
  run(what, caller, done, [&] {
    NcclResult result = NcclResult::kSuccess;
    for (const NcclMessage& each : sends) {
      if (each.bytes == 0 || !fine(result)) continue;
      note(sent_, each, tag);
      result = library_->send(each.address, each.bytes, NcclType::kUint8, each.peer, comm_,
                              stream_.handle());
    }
    for (const NcclMessage& each : receives) {
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

void NcclCommunicator::wait(const Done& done, void* caller) {
  const std::lock_guard lock(mutex_);
  const DeviceContext::Current current(*context_);
  if (done == done_) issue();
  require_sound([] { return std::string("an operation that was waited for"); });
  done->delay(caller);
}

bool NcclCommunicator::reached(const Done& done) {
  const std::lock_guard lock(mutex_);
  const DeviceContext::Current current(*context_);
  if (stream_.capturing()) return false;
  if (done == done_) {
    const auto what = [] { return std::string("an operation that was asked for"); };
    require_sound(what);
    if (state_ == NcclResult::kInProgress) library_->comm_get_async_error(comm_, &state_);
    if (state_ == NcclResult::kInProgress) return false;
    issue();
  }
  return done->reached();
}

std::vector<std::uint64_t> NcclCommunicator::sent() const {
  const std::lock_guard lock(mutex_);
  return sent_;
}

std::vector<std::uint64_t> NcclCommunicator::received() const {
  const std::lock_guard lock(mutex_);
  return received_;
}

void NcclCommunicator::run(Describe what, void* caller, const Done& done,
                           const std::function<NcclResult()>& calls) {
  const std::lock_guard lock(mutex_);
  const DeviceContext::Current current(*context_);
  issue();
  require_sound(what);
  ready_.record(caller);
  ready_.delay(stream_.handle());
  NcclResult result = library_->group_start();
  if (fine(result)) {
    result = calls();
    const NcclResult ended = library_->group_end();
    if (fine(result)) result = ended;
  }
  if (!fine(result)) fail(result, what());
  state_ = result;
  what_ = std::move(what);
  done_ = done;
  // The thread of NCCL and this one may not add to one graph at a time. Nobody is waited for: what
  // is captured has run before, so the ranks are connected.
  if (stream_.capturing()) issue();
}

void NcclCommunicator::issue() {
  if (done_ == nullptr) return;
  const Done done = std::exchange(done_, nullptr);
  settle(state_, limits_.issue, what_);
  done->record(stream_.handle());
}

void NcclCommunicator::require_sound(const Describe& what) {
  if (aborted_ || comm_ == nullptr) {
    throw NcclError(NcclError::Fault::kOtherRank, "NCCL: rank " + std::to_string(rank_) + " of " +
                                                      std::to_string(size_) + ": " + what() +
                                                      ": the group was ended before");
  }
  NcclResult state = NcclResult::kSuccess;
  const NcclResult asked = library_->comm_get_async_error(comm_, &state);
  if (!fine(asked)) fail(asked, what());
  if (!fine(state)) fail(state, what());
}

void NcclCommunicator::settle(NcclResult state, double seconds, const Describe& what) {
  const Clock::time_point began = Clock::now();
  while (state == NcclResult::kInProgress) {
    const Seconds elapsed = Clock::now() - began;
    if (aborted_) {
      give_up(NcclError::Fault::kOtherRank, what() + ": ended, as this rank or another one failed");
    }
    if (elapsed.count() > seconds) {
      give_up(NcclError::Fault::kTimeout, what() + ": not all ranks have come to it within " +
                                              std::to_string(static_cast<long>(seconds)) + " s");
    }
    // Mostly some ten microseconds; while others are still to come, as long as that takes.
    if (elapsed < std::chrono::microseconds(200)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min<Seconds>(elapsed / 8, std::chrono::milliseconds(1)));
    }
    const NcclResult asked = library_->comm_get_async_error(comm_, &state);
    if (!fine(asked)) state = asked;
  }
  if (state != NcclResult::kSuccess) fail(state, what());
}

void NcclCommunicator::fail(NcclResult result, const std::string& what) {
  std::string text = what + ": " + library_->get_error_string(result);
  const char* last = library_->get_last_error(comm_);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  std::ranges::replace(text, '\n', ' ');
  give_up(fault_of(result), text);
}

void NcclCommunicator::give_up(NcclError::Fault fault, const std::string& what) {
  aborted_ = true;
  end();
  throw NcclError(fault, "NCCL " + version_text(library_->version()) + ": rank " +
                             std::to_string(rank_) + " of " + std::to_string(size_) + ": " + what);
}

void NcclCommunicator::abort() {
  aborted_ = true;
  // A thread that waits for NCCL sees that and leaves. One that stays within it is ended by this
  // call, which NCCL allows beside others.
  std::unique_lock lock(mutex_, std::try_to_lock);
  for (int tries = 0; tries < 1000 && !lock.owns_lock(); ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock = std::unique_lock(mutex_, std::try_to_lock);
  }
  end();
}

void NcclCommunicator::end() {
  NcclComm* comm = comm_.exchange(nullptr);
  if (comm == nullptr) return;
  // On a thread, as NCCL waits without limit for graphs that hold operations of it to be destroyed.
  const auto over = std::make_shared<std::promise<void>>();
  std::thread([library = library_, context = context_, comm, over] {
    try {
      const DeviceContext::Current current(*context);
      library->comm_abort(comm);
    } catch (const DriverError&) {  // there is no device any more, and nothing to end
    }
    over->set_value();
  }).detach();
  if (over->get_future().wait_for(kAbortLimit) == std::future_status::timeout) stream_.retire();
}

void NcclCommunicator::close() {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  const DeviceContext::Current current(*context_);
  issue();
  const auto what = [] { return std::string("closing"); };
  settle(library_->comm_finalize(comm_), limits_.issue, what);
  const NcclResult result = library_->comm_destroy(comm_.exchange(nullptr));
  if (!fine(result)) fail(result, what());
}

}  // namespace pydist::comm
