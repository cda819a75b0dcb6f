// What CUDA's driver has for processes that reach into each other's memory of devices.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/driver/cuda_driver.hpp"

namespace pydist::comm {

// CUipcMemHandle: how another process of the machine finds an allocation.
struct IpcHandle {
  std::array<char, 64> reserved{};
  friend auto operator<=>(const IpcHandle&, const IpcHandle&) = default;
};

// Words of 32 bits by which streams of different processes wait for each other.
using Flag = std::uint32_t;

// The entry points of libcuda for that. tests/comm/test_cuda_abi.py holds them against cuda.h.
struct IpcCalls {
  using Address = std::uint64_t;  // CUdeviceptr

  int (*allocate)(Address*, std::size_t);
  int (*release)(Address);
  int (*fill)(Address, unsigned, std::size_t, void*);
  int (*synchronize)(void*);
  int (*export_block)(IpcHandle*, Address);
  int (*map)(Address*, IpcHandle, unsigned);
  int (*unmap)(Address);
  int (*copy)(Address, Address, std::size_t, void*);
  int (*set)(void*, Address, Flag, unsigned);
  int (*await)(void*, Address, Flag, unsigned);
  int (*attribute)(int*, int, int);
};

// What pydist does with them; beside CudaDriver. Failures are DriverErrors.
class IpcDriver {
 public:
  explicit IpcDriver(std::shared_ptr<const CudaDriver> driver);

  std::byte* allocate(std::size_t bytes) const;
  void release(std::byte* block) const;
  // Zeros, there when it returns; `stream` does it.
  void clear(std::byte* block, std::size_t bytes, void* stream) const;
  IpcHandle export_block(std::byte* block) const;
  std::byte* map(const IpcHandle& handle) const;
  void unmap(std::byte* block) const;

  // Put on a stream; the memory may be that of another process, but a stream waits for flags of
  // its own device alone. A flag is set after what the stream has copied before.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes, void* stream) const;
  void set(Flag* flag, Flag value, void* stream) const;
  void await(const Flag* flag, Flag value, bool flush, void* stream) const;
  // Whether a device can be told to let what others wrote before a flag arrive first. cuda.h has
  // that (`flush`) for devices that reorder remote writes; await does so wherever it is possible.
  bool can_flush(int device) const;

 private:
  std::shared_ptr<const CudaDriver> driver_;
  IpcCalls calls_;
};

}  // namespace pydist::comm
