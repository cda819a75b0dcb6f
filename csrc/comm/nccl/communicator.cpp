// A communicator's start within a time limit, the common part of all operations, and its end.
#include "comm/nccl/communicator.hpp"

#include <algorithm>
#include <chrono>
#include <future>
#include <thread>
#include <utility>

namespace pydist::comm {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr auto kAbortLimit = std::chrono::seconds(2);

GroupError::Fault fault_of(NcclResult result) {
  switch (result) {
    case NcclResult::kInvalidArgument:
    case NcclResult::kInvalidUsage:
      return GroupError::Fault::kUsage;
    case NcclResult::kRemoteError:
    case NcclResult::kSystemError:  // includes broken connections
      return GroupError::Fault::kOtherRank;
    default:
      return GroupError::Fault::kLibrary;
  }
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
  // NCCL's thread and this one may not add to one graph concurrently. This does not wait for other
  // ranks: captured operations have run before, so the ranks are connected.
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
    throw GroupError(GroupError::Fault::kOtherRank, "NCCL: rank " + std::to_string(rank_) + " of " +
                                                        std::to_string(size_) + ": " + what() +
                                                        ": the group was ended before");
  }
  NcclResult state = NcclResult::kSuccess;
  const NcclResult asked = library_->comm_get_async_error(comm_, &state);
  if (!fine(asked)) fail(asked, what());
  if (!fine(state)) fail(state, what());
}

void NcclCommunicator::settle(NcclResult state, double seconds, const Describe& what,
                              const char* late) {
  const Clock::time_point began = Clock::now();
  while (state == NcclResult::kInProgress) {
    const Seconds elapsed = Clock::now() - began;
    if (aborted_) {
      give_up(GroupError::Fault::kOtherRank,
              what() + ": ended, as this rank or another one failed");
    }
    if (elapsed.count() > seconds) {
      give_up(GroupError::Fault::kTimeout, what() + ": " + late + " within " +
                                               std::to_string(static_cast<long>(seconds)) + " s");
    }
    // Mostly some ten microseconds; longer while other ranks have not arrived.
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

void NcclCommunicator::give_up(GroupError::Fault fault, const std::string& what) {
  aborted_ = true;
  end();
  throw GroupError(fault, "NCCL " + version_text(library_->version()) + ": rank " +
                              std::to_string(rank_) + " of " + std::to_string(size_) + ": " + what);
}

void NcclCommunicator::abort() {
  aborted_ = true;
  // A thread that waits for NCCL sees that and returns. A thread blocked within NCCL is released by
  // this call, which NCCL allows concurrently with others.
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
  // On a thread, as NCCL waits without limit until graphs with its operations are destroyed.
  const auto over = std::make_shared<std::promise<void>>();
  std::thread([library = library_, context = context_, comm, over] {
    try {
      const DeviceContext::Current current(*context);
      library->comm_abort(comm);
    } catch (const DriverError&) {  // the device is lost, and nothing is left to end
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
  settle(library_->comm_finalize(comm_), limits_.issue, what,
         "not all ranks have reached it, or a CUDA graph that holds operations of the group was not"
         " reset,");
  const NcclResult result = library_->comm_destroy(comm_.exchange(nullptr));
  if (!fine(result)) fail(result, what());
}

}  // namespace pydist::comm
