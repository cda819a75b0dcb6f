// Sums over pooling windows on CUDA devices: the shared body, one launch per call.
//
// Threads: 256 per block. A row of PoolLanes belongs to a warp or less, whose lanes take the places
//   of the row; rows and places number the targets without repetition, so each sum is formed by one
//   lane, in one order: no atomics, and the same bits in every run.
// Traffic: each source is read kernel volume / stride volume times, mostly from the caches, each
//   target written once (and read, to accumulate). Nothing is allocated.
// Proof: tests/native/test_pool_sum.cpp emulates it, tests/gpu/test_kernels_gpu.py compares a
// device
//   with the CPU.
#include "launch/cuda.cuh"
#include "launch/runtime.cuh"
#include "ops/common/dispatch.hpp"
#include "ops/pool/kernels.hpp"
#include "ops/pool/sum_body.hpp"

namespace pydist::cuda {
namespace {

using ops::PoolOp;
using ops::PoolProblem;

// Instances: per dtype, three activations before the pool, with and without vectors of channels.
template <PoolOp kOp>
void pool(const PoolProblem& problem, const Queue& queue, const char* what) {
  const DeviceGuard guard(queue.device);
  ops::dispatch_floating(problem.dtype, [&]<class Storage>(std::type_identity<Storage>) {
    ops::dispatch_activation(problem.slope, [&](auto activation) {
      ops::with_pool_body<kOp, Storage, activation()>(problem, [&](const auto& body) {
        check(launch::run_on_cuda(body, body.run_length(), stream_of(queue)), what);
      });
    });
  });
}

}  // namespace

void pool_sum_forward(const PoolProblem& problem, const Queue& queue) {
  pool<PoolOp::kForward>(problem, queue, "launch of pool_sum_forward");
}

void pool_sum_backward(const PoolProblem& problem, const Queue& queue) {
  pool<PoolOp::kBackward>(problem, queue, "launch of pool_sum_backward");
}

}  // namespace pydist::cuda
