// NCCL's C interface as far as pydist uses it, declared anew: no header of NCCL is needed to build,
// and none could say what library a user has. tests/comm/test_nccl_abi.py holds it against nccl.h.
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

// An operation goes well so far.
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

// MAJOR * 10000 + MINOR * 100 + PATCH, as ncclGetVersion has it since 2.9.
constexpr int nccl_version(int major, int minor, int patch) {
  return major * 10000 + minor * 100 + patch;
}

// ncclConfig_t as NCCL 2.14 has it. Later versions append members, and take `size` bytes of what
// they are given: to those that `version` did not have yet they give their defaults. So this layout
// is right for all of them, while that of a newer header would be cut by an older library.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = nccl_version(2, 14, 0);
  int blocking = 0;
};
static_assert(sizeof(NcclConfig) == sizeof(std::size_t) + 4 * sizeof(int));

}  // namespace pydist::comm
