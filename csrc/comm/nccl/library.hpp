// The NCCL library, found and opened at run time: nothing links to it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "comm/driver/dynamic_library.hpp"
#include "comm/nccl/abi.hpp"

namespace pydist::comm {

// The entry points of NCCL that pydist calls.
class NcclLibrary {
 public:
  // The first version with ncclCommInitRankConfig, and so with communicators that do not block.
  static constexpr int kOldest = nccl_version(2, 14, 0);

  // See DynamicLibrary. A copy that is already loaded is torch's: two would not know of each
  // other's work on the device.
  NcclLibrary(const std::vector<std::string>& paths, bool use_loaded);

  int version() const { return version_; }
  // Of the file that is open.
  const std::string& path() const { return path_; }

  // The id by which all ranks of a new communicator find each other.
  NcclUniqueId unique_id() const;

  NcclResult (*get_version)(int*);
  NcclResult (*get_unique_id)(NcclUniqueId*);
  const char* (*get_error_string)(NcclResult);
  const char* (*get_last_error)(NcclComm*);
  NcclResult (*comm_init_rank_config)(NcclComm**, int, NcclUniqueId, int, NcclConfig*);
  NcclResult (*comm_get_async_error)(NcclComm*, NcclResult*);
  NcclResult (*comm_finalize)(NcclComm*);
  NcclResult (*comm_destroy)(NcclComm*);
  NcclResult (*comm_abort)(NcclComm*);
  NcclResult (*group_start)();
  NcclResult (*group_end)();
  NcclResult (*send)(const void*, std::size_t, NcclType, int, NcclComm*, void*);
  NcclResult (*recv)(void*, std::size_t, NcclType, int, NcclComm*, void*);
  NcclResult (*broadcast)(const void*, void*, std::size_t, NcclType, int, NcclComm*, void*);
  NcclResult (*reduce)(const void*, void*, std::size_t, NcclType, NcclOp, int, NcclComm*, void*);
  NcclResult (*all_reduce)(const void*, void*, std::size_t, NcclType, NcclOp, NcclComm*, void*);
  NcclResult (*all_gather)(const void*, void*, std::size_t, NcclType, NcclComm*, void*);
  NcclResult (*reduce_scatter)(const void*, void*, std::size_t, NcclType, NcclOp, NcclComm*, void*);

 private:
  DynamicLibrary library_;
  std::string path_;
  int version_ = 0;
};

// "2.27.5" of 22705.
std::string version_text(int version);

}  // namespace pydist::comm
