// Maxima over pooling windows on CUDA devices: the shared body, one launch per call.
//
// Threads: 256 per block. A row of PoolLanes belongs to a warp or less, whose lanes take the places
//   of the row; rows and places number the targets (MaxScatterBody: the cells) without repetition,
//   so each target is written by one lane.
// Traffic: as of the body (max_body.hpp, max_choice.hpp). No workspace is allocated and the host
//   does not wait, so a captured graph can hold the launch.
// Proof: tests/native/test_pool_max.cpp emulates it, tests/gpu/test_kernels_gpu.py compares a
// device
//   with the CPU.
#include "launch/cuda.cuh"
#include "launch/runtime.cuh"
#include "ops/common/dispatch.hpp"
#include "ops/pool/kernels.hpp"
#include "ops/pool/max_choice.hpp"

namespace pydist::cuda {
namespace {

using ops::MaxOp;
using ops::MaxProblem;

// Instances: per dtype, two types of taps, with and without vectors of channels.
template <MaxOp kOp>
void pool(const MaxProblem& problem, const Queue& queue, const char* what) {
  const DeviceGuard guard(queue.device);
  ops::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
    const auto run = [&]<class Tap>(std::type_identity<Tap>) {
      ops::with_max_body<kOp, Storage, Tap>(problem, [&](const auto& body) {
        check(launch::run_on_cuda(body, body.run_length(), stream_of(queue)), what);
      });
    };
    if (problem.tap_dtype == DType::kUInt8) {
      run(std::type_identity<std::uint8_t>{});
    } else {
      run(std::type_identity<std::int32_t>{});
    }
  });
}

}  // namespace

void pool_max_forward(const MaxProblem& problem, const Queue& queue) {
  pool<MaxOp::kForward>(problem, queue, "launch of pool_max_forward");
}

void pool_max_backward(const MaxProblem& problem, const Queue& queue) {
  pool<MaxOp::kBackward>(problem, queue, "launch of pool_max_backward");
}

void pool_max_pick(const MaxProblem& problem, const Queue& queue) {
  pool<MaxOp::kPick>(problem, queue, "launch of pool_max_pick");
}

}  // namespace pydist::cuda
