// Devices, errors and streams of CUDA, without its headers: what the bindings may see.
#pragma once

#include <stdexcept>
#include <string>

namespace pydist::cuda {

// A call of the CUDA runtime failed. Python sees a RuntimeError.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Devices that this process can use; 0 where there is no driver.
int device_count();

// A stream of the caller's framework on one device (a cudaStream_t). Kernels are ordered after what
// was put on it before, and nothing waits for them here.
struct Queue {
  int device;
  void* stream;
};

}  // namespace pydist::cuda
