// Code shared by the benchmarks of CUDA kernels: memory on the device, and times by its events.
#pragma once

#include <benchmark/benchmark.h>
#include <cuda_runtime.h>

#include <cstddef>

#include "launch/device.hpp"

namespace pydist::bench {

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw cuda::CudaError(cudaGetErrorString(status));
}

// RAII memory on the device.
class Memory {
 public:
  explicit Memory(std::size_t bytes) { check(cudaMalloc(&data_, bytes > 0 ? bytes : 1)); }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// RAII event that records its time.
class TimedEvent {
 public:
  TimedEvent() { check(cudaEventCreate(&event_)); }
  ~TimedEvent() { cudaEventDestroy(event_); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;

  void record(void* stream = nullptr) {
    check(cudaEventRecord(event_, static_cast<cudaStream_t>(stream)));
  }
  void synchronize() const { check(cudaEventSynchronize(event_)); }
  // Seconds from `start`.
  double since(const TimedEvent& start) const {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start.event_, event_));
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Times call() on the default stream, an iteration at a time.
template <class Call>
void run_on_device(benchmark::State& state, const Call& call) {
  TimedEvent begin, end;
  for (auto _ : state) {
    begin.record();
    call();
    end.record();
    end.synchronize();
    state.SetIterationTime(end.since(begin));
  }
}

// Each registers its benchmarks.
void register_conv();
void register_pack();
void register_exchange();
// Disconnects the ranks.
void close_exchange();
// Prints what is known of the boundary convolutions without a device.
void print_conv_counts();

}  // namespace pydist::bench
