// The common part of all exchanges of a group: the current context, errors, the end of the group.
#include "comm/ipc/group.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace pydist::comm {

IpcGroup::IpcGroup(std::shared_ptr<IpcMemory> memory, int rank, int size)
    : memory_(std::move(memory)),
      rank_(rank),
      size_(size),
      stream_(memory_->context()),
      ready_(memory_->context()),
      order_(rank, size) {}

void IpcGroup::run(const std::function<std::string()>& what, const std::function<void()>& calls) {
  const std::lock_guard lock(mutex_);
  if (ended_) {
    throw GroupError(GroupError::Fault::kOtherRank, named(what()) + ": the group was ended before");
  }
  const DeviceContext::Current current(*memory_->context());
  try {
    calls();
  } catch (const DriverError& error) {
    ended_ = true;
    throw GroupError(GroupError::Fault::kLibrary, named(what()) + ": " + error.what());
  } catch (const GroupError& error) {
    ended_ = true;
    throw GroupError(error.fault(), named(what()) + ": " + error.what());
  }
}

// Waits for this rank's copies on the host, in steps that grow with the time waited: at first
// microseconds, then a millisecond. A stream that does not end in time is not used by later groups.
void IpcGroup::rest(double seconds) {
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  Event done(memory_->context());
  const auto what = [] { return std::string("the end of all exchanges"); };
  run(what, [&] { done.record(stream_.handle()); });
  const Clock::time_point began = Clock::now();
  for (;;) {
    bool reached = false;
    run(what, [&] { reached = done.reached(); });
    if (reached) return;
    const Seconds elapsed = Clock::now() - began;
    if (elapsed.count() > seconds) {
      stream_.retire();  // its work may never end
      throw GroupError(GroupError::Fault::kTimeout,
                       named(what()) + ": another rank has not reached it within " +
                           std::to_string(static_cast<long>(seconds)) + " s");
    }
    std::this_thread::sleep_for(std::min<Seconds>(elapsed / 8, std::chrono::milliseconds(1)));
  }
}

std::string IpcGroup::named(const std::string& what) const {
  return "CUDA IPC: rank " + std::to_string(rank_) + " of " + std::to_string(size_) + ": " + what;
}

}  // namespace pydist::comm
