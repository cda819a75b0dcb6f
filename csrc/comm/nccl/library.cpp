// NCCL's entry points, and the oldest version that has all of them.
#include "comm/nccl/library.hpp"

#include <dlfcn.h>

#include <stdexcept>

namespace pydist::comm {

NcclLibrary::NcclLibrary(const std::vector<std::string>& paths, bool use_loaded)
    : library_("NCCL", use_loaded ? "libnccl.so.2" : "", paths) {
  library_.find("ncclGetVersion", get_version);
  Dl_info file;
  const bool known = dladdr(reinterpret_cast<void*>(get_version), &file) != 0;
  path_ = known ? file.dli_fname : library_.path();
  if (get_version(&version_) != NcclResult::kSuccess || version_ < kOldest) {
    throw LibraryMissing("NCCL " + version_text(version_) + " (" + path() +
                         ") is too old: pydist needs " + version_text(kOldest) +
                         " or newer, for communicators whose start can be given a time limit");
  }
  library_.find("ncclGetUniqueId", get_unique_id);
  library_.find("ncclGetErrorString", get_error_string);
  library_.find("ncclGetLastError", get_last_error);
  library_.find("ncclCommInitRankConfig", comm_init_rank_config);
  library_.find("ncclCommGetAsyncError", comm_get_async_error);
  library_.find("ncclCommFinalize", comm_finalize);
  library_.find("ncclCommDestroy", comm_destroy);
  library_.find("ncclCommAbort", comm_abort);
  library_.find("ncclGroupStart", group_start);
  library_.find("ncclGroupEnd", group_end);
  library_.find("ncclSend", send);
  library_.find("ncclRecv", recv);
  library_.find("ncclBroadcast", broadcast);
  library_.find("ncclReduce", reduce);
  library_.find("ncclAllReduce", all_reduce);
  library_.find("ncclAllGather", all_gather);
  library_.find("ncclReduceScatter", reduce_scatter);
}

NcclUniqueId NcclLibrary::unique_id() const {
  NcclUniqueId id{};
  const NcclResult result = get_unique_id(&id);
  if (result != NcclResult::kSuccess) {
    throw std::runtime_error("NCCL " + version_text(version_) + " (" + path() +
                             "): ncclGetUniqueId failed: " + get_error_string(result) + "; " +
                             get_last_error(nullptr));
  }
  return id;
}

std::string version_text(int version) {
  // Before 2.9 the minor version had one digit: 2708 was 2.7.8.
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const int rest = version < 10000 ? version % 1000 : version % 10000;
  return std::to_string(major) + "." + std::to_string(rest / 100) + "." +
         std::to_string(rest % 100);
}

}  // namespace pydist::comm
