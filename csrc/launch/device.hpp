// Devices, errors and streams of CUDA for the bindings, without CUDA's headers.
#pragma once

#include <stdexcept>
#include <string>

namespace pydist::cuda {

// A call of the CUDA runtime failed. Python sees a RuntimeError.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Devices that this process can use; 0 without a driver.
int device_count();

// A stream of the caller's framework on one device (a cudaStream_t). Kernels run after earlier work
// on it, and the host does not wait for them.
struct Queue {
  int device;
  void* stream;
};

}  // namespace pydist::cuda
