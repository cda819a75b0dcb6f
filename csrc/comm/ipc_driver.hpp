// What CUDA's driver has for processes that reach into each other's memory of devices.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/cuda_driver.hpp"

namespace pydist::comm {

// CUipcMemHandle: how another process of the machine finds an allocation.
struct IpcHandle {
  std::array<char, 64> reserved{};
  friend auto operator<=>(const IpcHandle&, const IpcHandle&) = default;
};

// Words of 32 bits by which streams of different processes wait for each other.
using Flag = std::uint32_t;

// The entry points of libcuda for that, beside those of CudaDriver. Addresses are CUdeviceptr.
class IpcDriver {
 public:
  using Address = std::uint64_t;

  explicit IpcDriver(std::shared_ptr<const CudaDriver> driver);

  const CudaDriver& cuda() const { return *driver_; }
  const std::shared_ptr<const CudaDriver>& shared() const { return driver_; }

  std::byte* allocate(std::size_t bytes) const;
  void release(std::byte* block) const;
  // Zeros, there when it returns; `stream` does it.
  void clear(std::byte* block, std::size_t bytes, void* stream) const;
  IpcHandle export_block(std::byte* block) const;
  std::byte* map(const IpcHandle& handle) const;
  void unmap(std::byte* block) const;

  // Put on a stream; the memory may be that of another process, but a stream waits for flags of
  // its own device alone. A flag that is set is set behind what the stream has copied.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes, void* stream) const;
  void set(Flag* flag, Flag value, void* stream) const;
  void await(const Flag* flag, Flag value, bool flush, void* stream) const;
  // Whether a device can be told to let what others wrote arrive before it goes on. Where it can't,
  // a flag never overtakes what was written before it.
  bool can_flush(int device) const;

 private:
  std::shared_ptr<const CudaDriver> driver_;
  int (*allocate_)(Address*, std::size_t);
  int (*release_)(Address);
  int (*fill_)(Address, unsigned, std::size_t, void*);
  int (*synchronize_)(void*);
  int (*export_)(IpcHandle*, Address);
  int (*map_)(Address*, IpcHandle, unsigned);
  int (*unmap_)(Address);
  int (*copy_)(Address, Address, std::size_t, void*);
  int (*set_)(void*, Address, Flag, unsigned);
  int (*await_)(void*, Address, Flag, unsigned);
  int (*attribute_)(int*, int, int);
};

}  // namespace pydist::comm
