// The number of CUDA devices, 0 without a driver.
#include "launch/runtime.cuh"

namespace pydist::cuda {

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

}  // namespace pydist::cuda
