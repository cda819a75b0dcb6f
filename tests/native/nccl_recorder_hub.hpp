// What the recorder's ranks share: messages on their way, collectives they meet in; see
// nccl_recorder.cpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/nccl_abi.hpp"
#include "nccl_recorder_streams.hpp"

namespace recorder {

using pydist::comm::NcclOp;
using pydist::comm::NcclResult;
using pydist::comm::NcclType;

inline constexpr auto kPatience = std::chrono::seconds(20);
inline std::string last_error;  // what ncclGetLastError says

struct Parcel {
  const void* data;
  std::size_t bytes;
  bool taken = false;
};

enum class Kind { kSend, kRecv, kBroadcast, kReduce, kAllReduce, kAllGather, kReduceScatter };

struct Call {
  Kind kind;
  const std::byte* in;
  std::byte* out;
  std::size_t count;
  NcclType type;
  NcclOp op;
  int peer;  // or root

  bool fits(const Call& other) const {
    return kind == other.kind && count == other.count && type == other.type && op == other.op &&
           peer == other.peer;
  }
};

inline std::size_t size_of(NcclType type) {
  switch (type) {
    case NcclType::kInt32:
    case NcclType::kFloat32:
      return 4;
    case NcclType::kInt64:
    case NcclType::kFloat64:
      return 8;
    default:
      return 1;
  }
}

template <class T>
inline void combine(std::byte* into, const std::byte* from, std::size_t count, NcclOp op) {
  T* a = reinterpret_cast<T*>(into);
  const T* b = reinterpret_cast<const T*>(from);
  for (std::size_t i = 0; i < count; ++i) {
    a[i] = op == NcclOp::kSum ? static_cast<T>(a[i] + b[i])
                              : (op == NcclOp::kMax ? std::max(a[i], b[i]) : std::min(a[i], b[i]));
  }
}

inline void combine(std::byte* into, const std::byte* from, std::size_t count, NcclType type,
                    NcclOp op) {
  switch (type) {
    case NcclType::kInt32:
      return combine<int>(into, from, count, op);
    case NcclType::kInt64:
      return combine<long long>(into, from, count, op);
    case NcclType::kFloat32:
      return combine<float>(into, from, count, op);
    case NcclType::kFloat64:
      return combine<double>(into, from, count, op);
    default:
      return combine<unsigned char>(into, from, count, op);
  }
}

// A collective to which the ranks come one by one.
struct Meeting {
  std::vector<Call> calls;
  std::vector<bool> here;
  std::size_t arrived = 0;
  bool over = false;

  // The sum (or so) over ranks of `count` elements, in rank order, `skip` elements into each.
  std::vector<std::byte> reduced(std::size_t skip) const {
    const std::size_t bytes = calls[0].count * size_of(calls[0].type);
    const std::size_t start = skip * size_of(calls[0].type);
    std::vector<std::byte> total(calls[0].in + start, calls[0].in + start + bytes);
    for (std::size_t rank = 1; rank < calls.size(); ++rank) {
      combine(total.data(), calls[rank].in + start, calls[0].count, calls[0].type, calls[0].op);
    }
    return total;
  }

  void finish() {
    const Call& first = calls[0];
    const std::size_t bytes = first.count * size_of(first.type);
    const auto root = static_cast<std::size_t>(first.peer);
    const auto total = first.kind == Kind::kAllReduce || first.kind == Kind::kReduce
                           ? reduced(0)
                           : std::vector<std::byte>();
    for (std::size_t rank = 0; rank < calls.size(); ++rank) {
      const Call& mine = calls[rank];
      if (first.kind == Kind::kBroadcast) {
        std::memmove(mine.out, calls[root].in, bytes);
      } else if (first.kind == Kind::kAllGather) {
        for (std::size_t each = 0; each < calls.size(); ++each) {
          std::memmove(mine.out + each * bytes, calls[each].in, bytes);
        }
      } else if (first.kind == Kind::kReduceScatter) {
        std::memcpy(mine.out, reduced(rank * first.count).data(), bytes);
      } else if (first.kind == Kind::kAllReduce || rank == root) {
        std::memcpy(mine.out, total.data(), bytes);
      }
    }
    over = true;
  }
};

// What the ranks of a communicator share.
struct Hub {
  std::mutex mutex;
  std::condition_variable changed;
  int joined = 0;
  bool ended = false;  // a rank has aborted
  NcclResult failure = NcclResult::kSuccess;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Parcel>>> mail;  // (from, to)
  std::map<long, Meeting> meetings;
  std::set<int> begun;  // the ranks that have started a first group: others can connect to them

  // Waits, with the lock held; false if the job has ended.
  template <class Condition>
  bool await(std::unique_lock<std::mutex>& lock, Condition condition) {
    if (!changed.wait_for(lock, kPatience, [&] { return ended || condition(); })) {
      refuse("waited in vain");
    }
    return !ended;
  }
  void refuse(const std::string& why) {
    note("mismatch: " + why);
    last_error = why;
    failure = NcclResult::kInvalidUsage;
    ended = true;
    changed.notify_all();
  }
};

}  // namespace recorder

namespace pydist::comm {

struct NcclComm {
  NcclComm(std::shared_ptr<recorder::Hub> shared, int own, int count)
      : hub(std::move(shared)), rank(own), size(count) {}

  std::shared_ptr<recorder::Hub> hub;
  int rank, size;
  int polls = 1;  // that still find it in progress
  std::atomic<bool> issuing = false;
  std::thread issuer;
  long meetings = 0;

  // As NCCL does it: those that are to exchange something come to it first.
  void connect(const std::vector<recorder::Call>& calls) {
    std::unique_lock lock(hub->mutex);
    hub->begun.insert(rank);
    hub->changed.notify_all();
    hub->await(lock, [&] {
      return std::ranges::all_of(calls, [&](const recorder::Call& each) {
        const bool single =
            each.kind == recorder::Kind::kSend || each.kind == recorder::Kind::kRecv;
        return single ? hub->begun.contains(each.peer)
                      : hub->begun.size() == static_cast<std::size_t>(size);
      });
    });
  }

  void join() {
    if (issuer.joinable()) issuer.join();
  }

  void run(const std::vector<recorder::Call>& calls) {
    std::vector<std::shared_ptr<recorder::Parcel>> sent;
    std::unique_lock lock(hub->mutex);
    for (const recorder::Call& each : calls) {
      if (each.kind != recorder::Kind::kSend) continue;
      sent.push_back(std::make_shared<recorder::Parcel>(recorder::Parcel{each.in, each.count}));
      hub->mail[{rank, each.peer}].push_back(sent.back());
      hub->changed.notify_all();
    }
    for (const recorder::Call& each : calls) {
      if (each.kind != recorder::Kind::kRecv) continue;
      auto& box = hub->mail[{each.peer, rank}];
      if (!hub->await(lock, [&] { return !box.empty(); })) return;
      const std::shared_ptr<recorder::Parcel> parcel = box.front();
      box.pop_front();
      if (parcel->bytes != each.count) {
        return hub->refuse(std::to_string(parcel->bytes) + " bytes sent, " +
                           std::to_string(each.count) + " expected");
      }
      std::memcpy(each.out, parcel->data, each.count);
      parcel->taken = true;
      hub->changed.notify_all();
    }
    for (const recorder::Call& each : calls) {
      if (each.kind != recorder::Kind::kSend && each.kind != recorder::Kind::kRecv)
        meet(each, lock);
    }
    hub->await(lock, [&] { return std::ranges::all_of(sent, [](auto& p) { return p->taken; }); });
  }

  void meet(const recorder::Call& call, std::unique_lock<std::mutex>& lock) {
    recorder::Meeting& meeting = hub->meetings[meetings++];
    meeting.calls.resize(static_cast<std::size_t>(size), call);
    meeting.calls[static_cast<std::size_t>(rank)] = call;
    if (!call.fits(meeting.calls[0])) return hub->refuse("ranks call different collectives");
    if (++meeting.arrived == static_cast<std::size_t>(size)) {
      meeting.finish();
      hub->changed.notify_all();
    }
    hub->await(lock, [&] { return meeting.over; });
  }
};

}  // namespace pydist::comm
