// The part of DLPack's C ABI (version 1) through which Python tensors are borrowed: the structs of
// dmlc/dlpack's dlpack.h, declared here so that building needs no foreign header. Field order and
// types are fixed by DLPack's specification.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pydist::dlpack {

// Tables of another major version may have another layout: they are not used.
inline constexpr std::uint32_t kMajorVersion = 1;
// The name of the capsule in the attribute __dlpack_c_exchange_api__ of a tensor's type.
inline constexpr const char* kCapsuleName = "dlpack_exchange_api";

// DLDeviceType: kCudaHost is page-locked host memory, which the CPU accesses; kCudaManaged moves
// between host and device by itself.
enum DeviceCode : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

// DLDataTypeCode, without the codes that no DType has.
enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

// DLDevice.
struct Device {
  std::int32_t type;   // a DeviceCode, or one that is not listed here
  std::int32_t index;  // 0 for the CPU
};

// DLDataType.
struct DataType {
  std::uint8_t code;    // a TypeCode, or one that is not listed here
  std::uint8_t bits;    // of one lane
  std::uint16_t lanes;  // above 1 for vector types
};

// DLTensor. Everything that it points to belongs to the tensor that was borrowed.
struct Tensor {
  void* data;  // may be null without elements, and for tensors without storage
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;        // [ndim]
  std::int64_t* strides;      // [ndim], in elements; null means C order
  std::uint64_t byte_offset;  // from `data` to the element with all indices 0
};

// DLPackVersion. Another minor version has the same layout.
struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

// DLPackExchangeAPIHeader, the start of each table.
struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;  // the table of an older major version, or null
};

// DLPackExchangeAPI. Functions are called with the GIL held, and return 0, or -1 with a Python
// exception set. The three that are not used here are kept as untyped slots.
struct ExchangeTable {
  ExchangeHeader header;
  void (*managed_tensor_allocator)();
  void (*managed_tensor_from_object)();
  void (*managed_tensor_to_object)();
  // Fills `out` from a PyObject*, whose memory it borrows: no reference is taken. May be null.
  int (*tensor_from_object)(void* object, Tensor* out);
  // The stream on which the framework puts its work on a device, as a cudaStream_t.
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_index, void** stream);
};

static_assert(sizeof(DataType) == 4 && sizeof(Device) == 8 && sizeof(Version) == 8);
static_assert(offsetof(Tensor, dtype) == 20 && sizeof(Tensor) == 48);
static_assert(offsetof(ExchangeTable, tensor_from_object) == 40);

}  // namespace pydist::dlpack
