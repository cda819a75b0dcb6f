// The recorder's NCCL; driver_recorder.cpp has its CUDA driver and explains the recorder. Ranks are
// threads or processes of one machine: they exchange data through a file in memory, also within a
// process. As in NCCL with nonblocking communicators, a thread puts a group on its stream some time
// after ncclGroupEnd: an event that is recorded too early does not cover it.
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/nccl/abi.hpp"
#include "driver_recorder_memory.hpp"
#include "nccl_recorder_member.hpp"
#include "nccl_recorder_streams.hpp"

using pydist::comm::NcclComm;
using pydist::comm::NcclConfig;
using pydist::comm::NcclUniqueId;
using namespace recorder;

struct pydist::comm::NcclComm {
  std::shared_ptr<Member> member;  // until it is destroyed or aborted
  std::string id;
  std::atomic<int> polls = 1;  // remaining polls that report it as in progress
  std::atomic<bool> issuing = false;
  std::thread issuer = {};
  std::mutex mutex = {};

  // Groups on a stream also keep the member alive.
  std::shared_ptr<Member> get() {
    const std::lock_guard lock(mutex);
    return member;
  }
  void drop() {
    const std::lock_guard lock(mutex);
    member = nullptr;
  }
  void join() {
    if (issuer.joinable()) issuer.join();
  }
};

namespace {

int version_shown = 23203;
std::atomic<long> abort_us = 0;  // duration of an abort
int failing_send = 0;            // the result of the next ncclSend, if not 0
std::string last_error;          // without a communicator

std::mutex offering;
// Boards of this process by the names under which others find them, until all have found them.
auto& offers = *new std::map<std::string, File>;
// All communicators ever, kept to the end: a thread may query one that another has aborted.
auto& comms = *new std::vector<NcclComm*>;

void withdraw(const std::string& id) {
  const std::lock_guard lock(offering);
  offers.erase(id);
}

struct Group {
  bool open = false;
  std::map<std::pair<NcclComm*, Stream*>, std::vector<Call>> calls;
};
thread_local Group group;

NcclResult add(NcclComm* comm, Stream* stream, const Call& call, const char* name) {
  if (!group.open) return NcclResult::kInvalidUsage;
  const auto member = comm->get();
  if (member == nullptr || call.peer < 0 || call.peer >= member->size() ||
      size_of(call.type) == 0) {
    return NcclResult::kInvalidArgument;
  }
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
  *id = {};
  File file = File::make(sizeof(Board));
  std::byte* start = file ? file.map() : nullptr;
  if (start == nullptr || file.name().size() >= sizeof id->internal)
    return NcclResult::kSystemError;
  munmap(new (start) Board(), sizeof(Board));
  file.name().copy(id->internal, sizeof id->internal - 1);
  const std::lock_guard lock(offering);
  offers[file.name()] = std::move(file);
  return NcclResult::kSuccess;
}
EXPORT const char* ncclGetErrorString(NcclResult result) {
  return result == NcclResult::kInvalidUsage ? "invalid usage" : "recorded error";
}
EXPORT const char* ncclGetLastError(NcclComm* comm) {
  static thread_local std::string copy;
  const auto member = comm == nullptr ? nullptr : comm->get();
  copy = member == nullptr ? "" : member->why();
  return copy.empty() ? last_error.c_str() : copy.c_str();
}
EXPORT NcclResult ncclCommInitRankConfig(NcclComm** comm, int size, NcclUniqueId id, int rank,
                                         NcclConfig* config) {
  if (config->size != 24 || config->magic != 0xcafebeef || config->blocking != 0 ||
      size > Board::kMost || rank < 0 || rank >= size) {
    return NcclResult::kInvalidArgument;
  }
  const File file = File::open(id.internal);
  auto* board = file ? reinterpret_cast<Board*>(file.map()) : nullptr;
  if (board == nullptr) return NcclResult::kRemoteError;  // its owner has ended
  *comm = new NcclComm{std::make_shared<Member>(*board, rank, size), id.internal};
  const std::lock_guard lock(offering);
  comms.push_back(*comm);
  return NcclResult::kInProgress;
}
EXPORT NcclResult ncclCommGetAsyncError(NcclComm* comm, NcclResult* state) {
  const auto member = comm->get();
  *state = member == nullptr ? NcclResult::kRemoteError : member->state();
  if (*state != NcclResult::kSuccess) return NcclResult::kSuccess;
  if (!member->complete() || comm->issuing) {
    *state = NcclResult::kInProgress;
  } else if (comm->polls > 0) {
    --comm->polls;
    withdraw(comm->id);
    *state = NcclResult::kInProgress;
  }
  return NcclResult::kSuccess;
}
static std::atomic<bool> graphs_held = false;  // NCCL waits here until they are destroyed
EXPORT void recorder_hold_graphs(int held) { graphs_held = held != 0; }
EXPORT NcclResult ncclCommFinalize(NcclComm* comm) {
  return comm->polls = graphs_held ? 1 << 30 : 1, NcclResult::kInProgress;
}
EXPORT NcclResult ncclCommDestroy(NcclComm* comm) {
  comm->join();
  comm->drop();
  return note("destroy"), NcclResult::kSuccess;
}
EXPORT NcclResult ncclCommAbort(NcclComm* comm) {
  note("abort");
  std::this_thread::sleep_for(std::chrono::microseconds(abort_us.load()));
  withdraw(comm->id);
  comm->get()->abort();
  comm->join();
  comm->drop();
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
    comm->join();
    comm->issuing = true;
    comm->issuer = std::thread([comm = comm, stream = stream, calls = std::move(calls)] {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      const auto member = comm->get();
      member->connect(calls);
      note("issued");
      stream->put([member, calls] { member->run(calls); });
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
