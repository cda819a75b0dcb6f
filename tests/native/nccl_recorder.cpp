// The recorder's NCCL; driver_recorder.cpp is its CUDA driver, and says what a recorder is. Ranks
// are threads. As in NCCL with communicators that do not block, a thread puts a group on its stream
// some time after ncclGroupEnd: an event recorded too early does not cover it.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/nccl_abi.hpp"
#include "driver_recorder_memory.hpp"
#include "nccl_recorder_hub.hpp"
#include "nccl_recorder_streams.hpp"

using pydist::comm::NcclComm;
using pydist::comm::NcclConfig;
using pydist::comm::NcclUniqueId;
using namespace recorder;

namespace {

int version_shown = 23203;
std::atomic<long> abort_us = 0;  // that an abort takes
int failing_send = 0;            // the result of the next ncclSend, if not 0

std::mutex joining;
std::map<std::string, std::shared_ptr<Hub>> hubs;
// All that there were, kept to the end: a stream may be at work for one that was destroyed.
auto& comms = *new std::vector<pydist::comm::NcclComm*>;

struct Group {
  bool open = false;
  std::map<std::pair<NcclComm*, Stream*>, std::vector<Call>> calls;
};
thread_local Group group;

NcclResult add(NcclComm* comm, Stream* stream, const Call& call, const char* name) {
  if (!group.open) return NcclResult::kInvalidUsage;
  note(std::string(name) + " " + std::to_string(call.count) + " on " + name_of(stream));
  group.calls[{comm, stream}].push_back(call);
  return NcclResult::kSuccess;
}

const std::byte* in(const void* p) { return static_cast<const std::byte*>(p); }
std::byte* out(void* p) { return static_cast<std::byte*>(p); }

}  // namespace

// -- for tests --------------------------------------------------------------------------------

EXPORT void recorder_version(int version) { version_shown = version; }
EXPORT void recorder_abort_takes(long microseconds) { abort_us = microseconds; }
EXPORT void recorder_fail_next_send(int result, const char* why) {
  failing_send = result;
  last_error = why;
}

// -- NCCL -------------------------------------------------------------------------------------

EXPORT NcclResult ncclGetVersion(int* version) {
  return *version = version_shown, NcclResult::kSuccess;
}
EXPORT NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  static std::atomic<int> count = 0;
  *id = {};
  std::snprintf(id->internal, sizeof id->internal, "recorder %d", count++);
  return NcclResult::kSuccess;
}
EXPORT const char* ncclGetErrorString(NcclResult result) {
  return result == NcclResult::kInvalidUsage ? "invalid usage" : "recorded error";
}
EXPORT const char* ncclGetLastError(NcclComm*) { return last_error.c_str(); }
EXPORT NcclResult ncclCommInitRankConfig(NcclComm** comm, int size, NcclUniqueId id, int rank,
                                         NcclConfig* config) {
  if (config->size != 24 || config->magic != 0xcafebeef || config->blocking != 0) {
    return NcclResult::kInvalidArgument;
  }
  const std::lock_guard lock(joining);
  std::shared_ptr<Hub>& hub = hubs[id.internal];
  if (!hub) hub = std::make_shared<Hub>();
  ++hub->joined;
  comms.push_back(*comm = new NcclComm(hub, rank, size));
  return NcclResult::kInProgress;
}
EXPORT NcclResult ncclCommGetAsyncError(NcclComm* comm, NcclResult* state) {
  *state = NcclResult::kInProgress;
  std::unique_lock lock(comm->hub->mutex);
  if (comm->hub->ended) {
    const bool own = comm->hub->failure != NcclResult::kSuccess;
    *state = own ? comm->hub->failure : NcclResult::kRemoteError;
  } else {
    const std::lock_guard counting(joining);
    if (comm->hub->joined < comm->size || comm->polls-- > 0) return NcclResult::kSuccess;
    comm->polls = 0;
    *state = NcclResult::kSuccess;
  }
  if (comm->issuing && *state == NcclResult::kSuccess) *state = NcclResult::kInProgress;
  return NcclResult::kSuccess;
}
static std::atomic<bool> graphs_held = false;  // NCCL waits here for them to be destroyed
EXPORT void recorder_hold_graphs(int held) { graphs_held = held != 0; }
EXPORT NcclResult ncclCommFinalize(NcclComm* comm) {
  return comm->polls = graphs_held ? 1 << 30 : 1, NcclResult::kInProgress;
}
EXPORT NcclResult ncclCommDestroy(NcclComm* comm) {
  comm->join();
  return note("destroy"), NcclResult::kSuccess;
}
EXPORT NcclResult ncclCommAbort(NcclComm* comm) {
  note("abort");
  std::this_thread::sleep_for(std::chrono::microseconds(abort_us.load()));
  {
    const std::lock_guard lock(comm->hub->mutex);
    comm->hub->ended = true;
    comm->hub->changed.notify_all();
  }
  comm->join();
  return NcclResult::kSuccess;
}
EXPORT NcclResult ncclGroupStart() {
  note("group start");
  group.open = true;
  return NcclResult::kSuccess;
}
EXPORT NcclResult ncclGroupEnd() {
  note("group end");
  group.open = false;
  for (auto& [key, calls] : group.calls) {
    const auto [comm, stream] = key;
    comm->issuing = true;
    comm->join();
    comm->issuer = std::thread([comm = comm, stream = stream, calls = std::move(calls)] {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      comm->connect(calls);
      note("issued");
      stream->put([comm, calls] { comm->run(calls); });
      comm->issuing = false;
    });
  }
  const bool any = !group.calls.empty();
  group.calls.clear();
  return any ? NcclResult::kInProgress : NcclResult::kSuccess;
}
EXPORT NcclResult ncclSend(const void* data, std::size_t count, NcclType type, int peer,
                           NcclComm* comm, void* stream) {
  if (const int result = std::exchange(failing_send, 0)) return static_cast<NcclResult>(result);
  return add(comm, static_cast<Stream*>(stream),
             {Kind::kSend, in(data), nullptr, count, type, NcclOp::kSum, peer}, "send");
}
EXPORT NcclResult ncclRecv(void* data, std::size_t count, NcclType type, int peer, NcclComm* comm,
                           void* stream) {
  return add(comm, static_cast<Stream*>(stream),
             {Kind::kRecv, nullptr, out(data), count, type, NcclOp::kSum, peer}, "recv");
}
EXPORT NcclResult ncclBroadcast(const void* from, void* to, std::size_t count, NcclType type,
                                int root, NcclComm* comm, void* stream) {
  return add(comm, static_cast<Stream*>(stream),
             {Kind::kBroadcast, in(from), out(to), count, type, NcclOp::kSum, root}, "broadcast");
}
EXPORT NcclResult ncclReduce(const void* from, void* to, std::size_t count, NcclType type,
                             NcclOp op, int root, NcclComm* comm, void* stream) {
  return add(comm, static_cast<Stream*>(stream),
             {Kind::kReduce, in(from), out(to), count, type, op, root}, "reduce");
}
EXPORT NcclResult ncclAllReduce(const void* from, void* to, std::size_t count, NcclType type,
                                NcclOp op, NcclComm* comm, void* stream) {
  return add(comm, static_cast<Stream*>(stream),
             {Kind::kAllReduce, in(from), out(to), count, type, op, 0}, "all-reduce");
}
EXPORT NcclResult ncclAllGather(const void* from, void* to, std::size_t count, NcclType type,
                                NcclComm* comm, void* stream) {
  return add(comm, static_cast<Stream*>(stream),
             {Kind::kAllGather, in(from), out(to), count, type, NcclOp::kSum, 0}, "all-gather");
}
EXPORT NcclResult ncclReduceScatter(const void* from, void* to, std::size_t count, NcclType type,
                                    NcclOp op, NcclComm* comm, void* stream) {
  return add(comm, static_cast<Stream*>(stream),
             {Kind::kReduceScatter, in(from), out(to), count, type, op, 0}, "reduce-scatter");
}
