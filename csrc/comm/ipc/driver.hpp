// The CUDA driver's functions for processes that access each other's device memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/driver/cuda_driver.hpp"

namespace pydist::comm {

// CUipcMemHandle: identifies an allocation for other processes of the machine.
struct IpcHandle {
  std::array<char, 64> reserved{};
  friend auto operator<=>(const IpcHandle&, const IpcHandle&) = default;
};

// A word of 32 bits through which streams of different processes wait for each other.
using Flag = std::uint32_t;

// The entry points of libcuda for IPC. tests/comm/test_cuda_abi.py compares them with cuda.h.
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

// pydist's operations on them, besides CudaDriver. Failures are DriverErrors.
class IpcDriver {
 public:
  explicit IpcDriver(std::shared_ptr<const CudaDriver> driver);

  std::byte* allocate(std::size_t bytes) const;
  void release(std::byte* block) const;
  // Zeroes memory on `stream`, and waits until that is done.
  void clear(std::byte* block, std::size_t bytes, void* stream) const;
  IpcHandle export_block(std::byte* block) const;
  std::byte* map(const IpcHandle& handle) const;
  void unmap(std::byte* block) const;

  // Put on a stream; the memory may be that of another process, but a stream can wait only for
  // flags of its own device. A flag is set after the stream's earlier copies.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes, void* stream) const;
  void set(Flag* flag, Flag value, void* stream) const;
  void await(const Flag* flag, Flag value, bool flush, void* stream) const;
  // Whether a device can order others' writes before their flag. cuda.h has this (`flush`) for
  // devices that reorder remote writes; await uses it wherever it is possible.
  bool can_flush(int device) const;

 private:
  std::shared_ptr<const CudaDriver> driver_;
  IpcCalls calls_;
};

}  // namespace pydist::comm
