// The driver's calls for CUDA IPC, with their constants of cuda.h.
#include "comm/ipc/driver.hpp"

#include <utility>

namespace pydist::comm {
namespace {

constexpr unsigned kEnablePeerAccess = 1;    // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr unsigned kEqual = 1;               // CU_STREAM_WAIT_VALUE_EQ
constexpr unsigned kFlush = 1U << 30;        // CU_STREAM_WAIT_VALUE_FLUSH
constexpr int kCanFlushRemoteWrites = 98;    // CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
constexpr std::size_t kWord = sizeof(Flag);  // what cuMemsetD32Async counts

IpcCalls::Address address_of(const void* pointer) {
  return reinterpret_cast<IpcCalls::Address>(pointer);
}
std::byte* pointer_to(IpcCalls::Address address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

IpcDriver::IpcDriver(std::shared_ptr<const CudaDriver> driver) : driver_(std::move(driver)) {
  const DynamicLibrary& library = driver_->library();
  library.find("cuMemAlloc_v2", calls_.allocate);
  library.find("cuMemFree_v2", calls_.release);
  library.find("cuMemsetD32Async", calls_.fill);
  library.find("cuStreamSynchronize", calls_.synchronize);
  library.find("cuIpcGetMemHandle", calls_.export_block);
  library.find("cuIpcOpenMemHandle_v2", calls_.map);
  library.find("cuIpcCloseMemHandle", calls_.unmap);
  library.find("cuMemcpyAsync", calls_.copy);
  library.find("cuStreamWriteValue32_v2", calls_.set);
  library.find("cuStreamWaitValue32_v2", calls_.await);
  library.find("cuDeviceGetAttribute", calls_.attribute);
}

std::byte* IpcDriver::allocate(std::size_t bytes) const {
  IpcCalls::Address block = 0;
  driver_->check(calls_.allocate(&block, bytes), "cuMemAlloc");
  return pointer_to(block);
}

void IpcDriver::release(std::byte* block) const {
  driver_->check(calls_.release(address_of(block)), "cuMemFree");
}

void IpcDriver::clear(std::byte* block, std::size_t bytes, void* stream) const {
  driver_->check(calls_.fill(address_of(block), 0, bytes / kWord, stream), "cuMemsetD32Async");
  driver_->check(calls_.synchronize(stream), "cuStreamSynchronize");
}

IpcHandle IpcDriver::export_block(std::byte* block) const {
  IpcHandle handle;
  driver_->check(calls_.export_block(&handle, address_of(block)), "cuIpcGetMemHandle");
  return handle;
}

std::byte* IpcDriver::map(const IpcHandle& handle) const {
  IpcCalls::Address block = 0;
  driver_->check(calls_.map(&block, handle, kEnablePeerAccess), "cuIpcOpenMemHandle");
  return pointer_to(block);
}

void IpcDriver::unmap(std::byte* block) const {
  driver_->check(calls_.unmap(address_of(block)), "cuIpcCloseMemHandle");
}

void IpcDriver::copy(std::byte* to, const std::byte* from, std::size_t bytes, void* stream) const {
  driver_->check(calls_.copy(address_of(to), address_of(from), bytes, stream), "cuMemcpyAsync");
}

void IpcDriver::set(Flag* flag, Flag value, void* stream) const {
  driver_->check(calls_.set(stream, address_of(flag), value, 0), "cuStreamWriteValue32");
}

void IpcDriver::await(const Flag* flag, Flag value, bool flush, void* stream) const {
  const unsigned how = kEqual | (flush ? kFlush : 0U);
  driver_->check(calls_.await(stream, address_of(flag), value, how), "cuStreamWaitValue32");
}

bool IpcDriver::can_flush(int device) const {
  int able = 0;
  driver_->check(calls_.attribute(&able, kCanFlushRemoteWrites, device), "cuDeviceGetAttribute");
  return able != 0;
}

}  // namespace pydist::comm
