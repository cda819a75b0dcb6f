// A rank of a communicator of the recorder: what it gives to the others and takes from them; see
// nccl_recorder.cpp.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "nccl_recorder_board.hpp"
#include "nccl_recorder_calls.hpp"
#include "nccl_recorder_streams.hpp"
#include "recorder_file.hpp"

namespace recorder {

// What a rank gives in a group. Of a sheet, others have the entries, and behind them the data.
struct Entry {
  Call call;           // its addresses are nothing to others
  long number;         // of the message to its receiver, or of the collective
  std::size_t offset;  // of the data
};
struct Sheet {
  File file;
  std::vector<Entry> entries;
};

class Member {
 public:
  // Unmaps `board` at last.
  Member(Board& board, int rank, int size)
      : board_(board), own_(board.ranks[rank]), rank_(rank), size_(size) {
    own_.process = getpid();
    board_.tell();
  }
  Member(const Member&) = delete;
  ~Member() {
    own_.process = Board::kLeft;
    munmap(&board_, sizeof board_);
  }

  int size() const { return size_; }
  bool complete() const {
    return all([](const Board::Rank& each) { return each.process != 0; });
  }
  NcclResult state() const {
    const int ended = board_.ended;
    return ended == 0  ? NcclResult::kSuccess
           : ended < 0 ? NcclResult::kRemoteError
                       : NcclResult::kInvalidUsage;
  }
  std::string why() const {
    const int ended = board_.ended;
    return ended > 0 ? board_.ranks[ended - 1].why : "";
  }

  // As NCCL does it: those that are to exchange something come to it first.
  void connect(const std::vector<Call>& calls) {
    own_.begun = true;
    board_.tell();
    await([&] {
      return std::ranges::all_of(calls, [&](const Call& each) {
        return each.single() ? board_.ranks[each.peer].begun.load()
                             : all([](const Board::Rank& other) { return other.begun.load(); });
      });
    });
  }

  void run(const std::vector<Call>& calls) {
    const std::lock_guard lock(running_);
    if (board_.ended != 0) return;
    const File given = give(calls);  // until all have what is theirs
    const bool sound = std::ranges::all_of(calls, [&](const Call& each) {
      return each.kind == Kind::kSend || (each.kind == Kind::kRecv ? receive(each) : meet(each));
    });
    sheets_.clear();
    if (!sound) return;
    await([&] {
      for (int other = 0; other < size_; ++other) {
        if (board_.ranks[other].taken[rank_] < own_.sent[other]) return false;
        if (board_.ranks[other].seen < own_.met) return false;
      }
      return true;
    });
  }

  // Returns when no group of this rank is at work any more.
  void abort() {
    board_.end(Board::kAborted);
    const std::lock_guard lock(running_);
  }

 private:
  template <class Condition>
  bool all(Condition condition) const {
    return std::all_of(board_.ranks, board_.ranks + size_, condition);
  }

  // False if the job has ended.
  template <class Condition>
  bool await(Condition condition) {
    const Board::Waited waited = board_.await(condition);
    return waited == Board::Waited::kInVain ? refuse("waited in vain")
                                            : waited == Board::Waited::kDone;
  }

  bool refuse(const std::string& why) {
    const std::lock_guard lock(refusing_);
    if (board_.ended == 0) std::snprintf(own_.why, sizeof own_.why, "%s", why.c_str());
    if (board_.end(1 + rank_)) note("mismatch: " + why);
    return false;
  }

  File give(const std::vector<Call>& calls) {
    std::vector<Entry> entries;
    std::map<int, long> sent;
    long met = own_.met;
    for (const Call& each : calls) {
      if (each.kind == Kind::kRecv) continue;
      if (each.kind == Kind::kSend) sent.try_emplace(each.peer, own_.sent[each.peer]);
      entries.push_back({each, each.kind == Kind::kSend ? sent[each.peer]++ : met++, 0});
    }
    if (entries.empty()) return {};
    const std::size_t count = entries.size();
    std::size_t end = sizeof count + count * sizeof(Entry);
    for (Entry& each : entries) {
      each.offset = std::exchange(end, end + each.call.input(rank_, size_));
    }
    File file = File::make(end);
    bool sound = file && file.write(0, &count, sizeof count) &&
                 file.write(sizeof count, entries.data(), count * sizeof(Entry));
    for (const Entry& each : entries) {
      sound = sound && file.write(each.offset, each.call.in, each.call.input(rank_, size_));
    }
    if (!sound || file.name().size() >= sizeof own_.sheet)
      return refuse("no shared memory"), File();
    std::strcpy(own_.sheet, file.name().c_str());
    for (const auto& [peer, number] : sent) own_.sent[peer] = number;
    own_.met = met;
    board_.tell();
    return file;
  }

  // An entry that the counts say is there; none if its rank has ended meanwhile.
  template <class Condition>
  const Entry* find(int rank, Condition condition) {
    Sheet& sheet = sheets_[rank];
    if (sheet.file.name() != board_.ranks[rank].sheet) {
      std::size_t count = 0;
      sheet.file = File::open(board_.ranks[rank].sheet);
      bool sound = sheet.file && sheet.file.read(0, &count, sizeof count);
      sheet.entries.resize(count);
      sound = sound && sheet.file.read(sizeof count, sheet.entries.data(), count * sizeof(Entry));
      if (!sound) sheet.entries.clear();
    }
    const auto found = std::ranges::find_if(sheet.entries, condition);
    if (found != sheet.entries.end()) return &*found;
    board_.end(Board::kAborted);
    return nullptr;
  }

  bool take(int rank, const Entry& entry, std::size_t skip, std::byte* to, std::size_t bytes) {
    if (sheets_[rank].file.read(entry.offset + skip, to, bytes)) return true;
    board_.end(Board::kAborted);
    return false;
  }

  bool receive(const Call& call) {
    Board::Rank& sender = board_.ranks[call.peer];
    const long number = own_.taken[call.peer];
    if (!await([&] { return sender.sent[rank_] > number; })) return false;
    const Entry* message = find(call.peer, [&](const Entry& each) {
      return each.call.kind == Kind::kSend && each.call.peer == rank_ && each.number == number;
    });
    if (message == nullptr) return false;
    const std::size_t bytes = message->call.bytes();
    if (bytes != call.bytes()) {
      return refuse(std::to_string(bytes) + " bytes sent, " + std::to_string(call.bytes()) +
                    " expected");
    }
    if (!take(call.peer, *message, 0, call.out, bytes)) return false;
    own_.taken[call.peer] = number + 1;
    board_.tell();
    return true;
  }

  bool meet(const Call& call) {
    const long number = own_.seen;
    if (!await([&] { return all([&](auto& each) { return each.met > number; }); })) return false;
    std::vector<const Entry*> given;
    for (int rank = 0; rank < size_; ++rank) {
      given.push_back(find(rank, [&](const Entry& each) {
        return each.call.kind != Kind::kSend && each.number == number;
      }));
      if (given.back() == nullptr) return false;
      if (!given.back()->call.fits(call)) return refuse("ranks call different collectives");
    }
    if (!finish(call, given)) return false;
    own_.seen = number + 1;
    board_.tell();
    return true;
  }

  bool finish(const Call& call, const std::vector<const Entry*>& given) {
    const std::size_t bytes = call.bytes();
    if (call.kind == Kind::kBroadcast) {
      return take(call.peer, *given[static_cast<std::size_t>(call.peer)], 0, call.out, bytes);
    }
    if (call.kind == Kind::kReduce && rank_ != call.peer) return true;
    const bool gather = call.kind == Kind::kAllGather;
    const auto slice = static_cast<std::size_t>(rank_);
    const std::size_t skip = call.kind == Kind::kReduceScatter ? slice * bytes : 0;
    std::vector<std::byte> next(gather ? 0 : bytes);
    std::byte* to = call.out;
    for (int rank = 0; rank < size_; ++rank) {  // sums come in rank order
      std::byte* place = gather || rank == 0 ? to : next.data();
      if (!take(rank, *given[static_cast<std::size_t>(rank)], skip, place, bytes)) return false;
      if (gather) {
        to += bytes;
      } else if (rank > 0) {
        combine(to, next.data(), call);
      }
    }
    return true;
  }

  Board& board_;
  Board::Rank& own_;
  int rank_, size_;
  std::mutex running_, refusing_;
  std::map<int, Sheet> sheets_;  // of ranks from which the group under way has taken
};

}  // namespace recorder
