// What the recorder's NCCL is asked for, and how it adds; see nccl_recorder.cpp.
#pragma once

#include <algorithm>
#include <cstddef>

#include "comm/nccl/abi.hpp"

namespace recorder {

using pydist::comm::NcclOp;
using pydist::comm::NcclResult;
using pydist::comm::NcclType;

enum class Kind { kSend, kRecv, kBroadcast, kReduce, kAllReduce, kAllGather, kReduceScatter };

// Bytes of an element; 0 if pydist asks for none of that type.
inline std::size_t size_of(NcclType type) {
  switch (type) {
    case NcclType::kUint8:
      return 1;
    case NcclType::kInt32:
    case NcclType::kFloat32:
      return 4;
    case NcclType::kInt64:
    case NcclType::kFloat64:
      return 8;
    default:
      return 0;
  }
}

struct Call {
  Kind kind;
  const std::byte* in;
  std::byte* out;
  std::size_t count;
  NcclType type;
  NcclOp op;
  int peer;  // or root

  bool single() const { return kind == Kind::kSend || kind == Kind::kRecv; }
  bool fits(const Call& other) const {
    return kind == other.kind && count == other.count && type == other.type && op == other.op &&
           peer == other.peer;
  }
  std::size_t bytes() const { return count * size_of(type); }
  // What a rank of `size` gives to it.
  std::size_t input(int rank, int size) const {
    if (kind == Kind::kRecv || (kind == Kind::kBroadcast && rank != peer)) return 0;
    return kind == Kind::kReduceScatter ? bytes() * static_cast<std::size_t>(size) : bytes();
  }
};

template <class T>
inline void combine(std::byte* into, const std::byte* from, std::size_t count, NcclOp op) {
  T* a = reinterpret_cast<T*>(into);
  const T* b = reinterpret_cast<const T*>(from);
  for (std::size_t i = 0; i < count; ++i) {
    a[i] = op == NcclOp::kSum ? static_cast<T>(a[i] + b[i])
                              : (op == NcclOp::kMax ? std::max(a[i], b[i]) : std::min(a[i], b[i]));
  }
}

// into = into op from, for the elements of `call`.
inline void combine(std::byte* into, const std::byte* from, const Call& call) {
  switch (call.type) {
    case NcclType::kInt32:
      return combine<int>(into, from, call.count, call.op);
    case NcclType::kInt64:
      return combine<long long>(into, from, call.count, call.op);
    case NcclType::kFloat32:
      return combine<float>(into, from, call.count, call.op);
    case NcclType::kFloat64:
      return combine<double>(into, from, call.count, call.op);
    default:
      return combine<unsigned char>(into, from, call.count, call.op);
  }
}

}  // namespace recorder
