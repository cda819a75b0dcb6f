#include "comm/ipc_driver.hpp"

#include <utility>

namespace pydist::comm {
namespace {

constexpr unsigned kEnablePeerAccess = 1;    // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr unsigned kEqual = 1;               // CU_STREAM_WAIT_VALUE_EQ
constexpr unsigned kFlush = 1U << 30;        // CU_STREAM_WAIT_VALUE_FLUSH
constexpr int kCanFlushRemoteWrites = 98;    // CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
constexpr std::size_t kWord = sizeof(Flag);  // what cuMemsetD32Async counts

IpcDriver::Address address_of(const void* pointer) {
  return reinterpret_cast<IpcDriver::Address>(pointer);
}
std::byte* pointer_to(IpcDriver::Address address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

IpcDriver::IpcDriver(std::shared_ptr<const CudaDriver> driver) : driver_(std::move(driver)) {
  const DynamicLibrary& library = driver_->library();
  library.find("cuMemAlloc_v2", allocate_);
  library.find("cuMemFree_v2", release_);
  library.find("cuMemsetD32Async", fill_);
  library.find("cuStreamSynchronize", synchronize_);
  library.find("cuIpcGetMemHandle", export_);
  library.find("cuIpcOpenMemHandle_v2", map_);
  library.find("cuIpcCloseMemHandle", unmap_);
  library.find("cuMemcpyAsync", copy_);
  library.find("cuStreamWriteValue32_v2", set_);
  library.find("cuStreamWaitValue32_v2", await_);
  library.find("cuDeviceGetAttribute", attribute_);
}

std::byte* IpcDriver::allocate(std::size_t bytes) const {
  Address block = 0;
  driver_->check(allocate_(&block, bytes), "cuMemAlloc");
  return pointer_to(block);
}

void IpcDriver::release(std::byte* block) const {
  driver_->check(release_(address_of(block)), "cuMemFree");
}

void IpcDriver::clear(std::byte* block, std::size_t bytes, void* stream) const {
  driver_->check(fill_(address_of(block), 0, bytes / kWord, stream), "cuMemsetD32Async");
  driver_->check(synchronize_(stream), "cuStreamSynchronize");
}

IpcHandle IpcDriver::export_block(std::byte* block) const {
  IpcHandle handle;
  driver_->check(export_(&handle, address_of(block)), "cuIpcGetMemHandle");
  return handle;
}

std::byte* IpcDriver::map(const IpcHandle& handle) const {
  Address block = 0;
  driver_->check(map_(&block, handle, kEnablePeerAccess), "cuIpcOpenMemHandle");
  return pointer_to(block);
}

void IpcDriver::unmap(std::byte* block) const {
  driver_->check(unmap_(address_of(block)), "cuIpcCloseMemHandle");
}

void IpcDriver::copy(std::byte* to, const std::byte* from, std::size_t bytes, void* stream) const {
  driver_->check(copy_(address_of(to), address_of(from), bytes, stream), "cuMemcpyAsync");
}

void IpcDriver::set(Flag* flag, Flag value, void* stream) const {
  driver_->check(set_(stream, address_of(flag), value, 0), "cuStreamWriteValue32");
}

void IpcDriver::await(const Flag* flag, Flag value, bool flush, void* stream) const {
  const unsigned how = kEqual | (flush ? kFlush : 0U);
  driver_->check(await_(stream, address_of(flag), value, how), "cuStreamWaitValue32");
}

bool IpcDriver::can_flush(int device) const {
  int able = 0;
  driver_->check(attribute_(&able, kCanFlushRemoteWrites, device), "cuDeviceGetAttribute");
  return able != 0;
}

}  // namespace pydist::comm
