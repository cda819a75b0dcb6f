// The part of the CUDA runtime that csrc/launch, the families' cuda*.cu and their tests call, where
// PYDIST_CUDA=EMULATED: one device whose memory is the host's and whose one stream is the calling
// thread. It is not CUDA and proves nothing about it; it lets the host code around the kernels run
// where there is no device.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>

// Of a simulated device, if the process has loaded one: whether what the calling thread launches is
// being captured into a graph, and what keeps a launch for the graph's replays.
extern "C" {
__attribute__((weak)) bool simulated_capturing();
__attribute__((weak)) void simulated_capture(const std::function<void()>& launch);
}

// Numbers and names as CUDA has them.
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
};
using cudaStream_t = struct CUstream_st*;
inline constexpr unsigned cudaStreamNonBlocking = 1;

namespace emulated {

inline constexpr int kDevices = 1;
inline thread_local int device = 0;
inline thread_local cudaError_t last_error = cudaSuccess;

// Runs what is launched, or keeps it for the replays of a graph.
inline void launch(const std::function<void()>& run) {
  if (simulated_capturing != nullptr && simulated_capturing()) {
    simulated_capture(run);
  } else {
    run();
  }
}

// What a call returns. A failure stays until cudaGetLastError takes it away.
inline cudaError_t done(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

}  // namespace emulated

inline cudaError_t cudaGetLastError() { return std::exchange(emulated::last_error, cudaSuccess); }
inline const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorNoKernelImageForDevice:
      return "cudaErrorNoKernelImageForDevice";
  }
  return "unrecognized error code";
}
inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaSuccess ? "no error" : "an error of the emulated device";
}

inline cudaError_t cudaGetDeviceCount(int* count) {
  return *count = emulated::kDevices, cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) { return *device = emulated::device, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= emulated::kDevices) return emulated::done(cudaErrorInvalidDevice);
  return emulated::device = device, cudaSuccess;
}

// Memory of exactly the size, so that AddressSanitizer sees its end, aligned as CUDA's. Nobody
// promises zeros: it is full of NaN.
inline cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  constexpr std::size_t kAlignment = 256;
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (posix_memalign(memory, kAlignment, bytes) != 0) {
    return emulated::done(cudaErrorMemoryAllocation);
  }
  return std::memset(*memory, 0xff, bytes), cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}

// All streams are the calling thread, where what is launched has ended when the call returns.
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = nullptr, cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                                   cudaMemcpyKind kind, cudaStream_t) {
  return emulated::launch([=] { cudaMemcpy(to, from, bytes, kind); }), cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return stream == nullptr ? cudaSuccess : emulated::done(cudaErrorInvalidValue);
}
