// The part of NCCL's C interface that pydist uses, declared here: builds need no NCCL header, and
// no header knows the user's library. tests/comm/test_nccl_abi.py compares it with nccl.h.
#pragma once

#include <cstddef>

namespace pydist::comm {

struct NcclComm;  // opaque

struct NcclUniqueId {
  char internal[128];
};

// ncclResult_t
enum class NcclResult : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

// An operation has not failed so far.
constexpr bool fine(NcclResult result) {
  return result == NcclResult::kSuccess || result == NcclResult::kInProgress;
}

// ncclDataType_t
enum class NcclType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

// ncclRedOp_t
enum class NcclOp : int { kSum = 0, kMax = 2, kMin = 3 };

// MAJOR * 10000 + MINOR * 100 + PATCH, as returned by ncclGetVersion since 2.9.
constexpr int nccl_version(int major, int minor, int patch) {
  return major * 10000 + minor * 100 + patch;
}

// ncclConfig_t of NCCL 2.14. Later versions append members, read `size` bytes, and set members that
// `version` did not have to their defaults. So this layout is right for all of them, while an older
// library would cut that of a newer header.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = nccl_version(2, 14, 0);
  int blocking = 0;
};
static_assert(sizeof(NcclConfig) == sizeof(std::size_t) + 4 * sizeof(int));

}  // namespace pydist::comm
