// Stored values to inputs on CUDA devices: the shared bodies, one launch each.
//
// Threads: a warp or less per row, which is the last dim of [C, D, H, W]; lanes along it. Rows and
//   places of a row number the elements once, so each input is written by one lane. The flag is the
//   exception: any lane may set it, all of them to 1.
// Traffic: one stored value read and one input written per element; tables stay in the caches.
// Proof: tests/native/test_input.cpp emulates it, tests/gpu/test_input_gpu.py compares a device
// with
//   the CPU.
#include "launch/cuda.cuh"
#include "launch/runtime.cuh"
#include "ops/input/body_of_views.hpp"
#include "ops/input/kernels.hpp"

namespace pydist::cuda {
namespace {

// Launches a body: dispatch by dtype is in body_of_views.hpp, for both backends.
auto on_device(const Queue& queue, const char* what) {
  return [&queue, what](const auto& body) {
    const DeviceGuard guard(queue.device);
    check(launch::run_on_cuda(body, body.accesses(), stream_of(queue)), what);
  };
}

}  // namespace

void look_up(const TensorView& stored, const TensorView& table, double divisor,
             const TensorView& out, const TensorView& found, const Queue& queue) {
  ops::look_up_body(stored, table, divisor, out, found, on_device(queue, "launch of look_up"));
}

void rescale(const TensorView& stored, const TensorView& maps, bool log, double divisor,
             const TensorView& out, const TensorView& found, const Queue& queue) {
  ops::rescale_body(stored, maps, log, divisor, out, found, on_device(queue, "launch of rescale"));
}

}  // namespace pydist::cuda
