// Code shared by the families' .cu files: streams, errors of the runtime, the current device.
//
// Calls have no side effects: the current device is restored, and an error is cleared before it is
// thrown.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "launch/device.hpp"

namespace pydist::cuda {

inline cudaStream_t stream_of(const Queue& queue) {
  return static_cast<cudaStream_t>(queue.stream);
}

// Throws a CudaError that names the call, unless it was a success.
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // an error that is not sticky must not surface in an unrelated call
  std::string text =
      std::string(what) + ": " + cudaGetErrorName(status) + ", " + cudaGetErrorString(status);
  if (status == cudaErrorNoKernelImageForDevice) {
    text +=
        "; pydist was compiled for other GPUs (PYDIST_CUDA_ARCHITECTURES): on a machine with "
        "this one, run: pip install --force-reinstall --no-deps .";
  }
  throw CudaError(text);
}

// Makes a device current, and restores the previous one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace pydist::cuda
