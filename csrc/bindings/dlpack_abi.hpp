// The part of DLPack's C ABI (version 1) through which Python tensors are borrowed: the structs of
// dmlc/dlpack's dlpack.h, declared here so that building needs no foreign header. Field order and
// types are fixed by DLPack's specification.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pydist::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr const char* kCapsuleName = "dlpack_exchange_api";

enum DeviceCode : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Device {
  std::int32_t type;
  std::int32_t index;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null means C order
  std::uint64_t byte_offset;
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;  // the table of an older major version, or null
};

// Functions return 0, or -1 with a Python exception set. The three that are not used here are kept
// as untyped slots.
struct ExchangeTable {
  ExchangeHeader header;
  void (*managed_tensor_allocator)();
  void (*managed_tensor_from_object)();
  void (*managed_tensor_to_object)();
  int (*tensor_from_object)(void* object, Tensor* out);  // borrows; may be null
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_index, void** stream);
};

static_assert(sizeof(DataType) == 4 && sizeof(Device) == 8 && sizeof(Version) == 8);
static_assert(offsetof(Tensor, dtype) == 20 && sizeof(Tensor) == 48);
static_assert(offsetof(ExchangeTable, tensor_from_object) == 40);

}  // namespace pydist::dlpack
