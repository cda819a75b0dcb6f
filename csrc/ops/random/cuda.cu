// Keyed random numbers on CUDA devices: the shared body, one launch.
//
// Threads: a warp or less per row, which is the last dim; lanes along it. Each number depends on
// its
//   own counter only, so the decomposition changes no bit. A key in device memory is read by every
//   thread when the kernel runs: each replay of a captured graph has a new one.
// Traffic: one element written, nothing read.
// Proof: tests/gpu/test_kernels_gpu.py (bit-identical to the CPU), tests/native/test_random.cpp.
#include "launch/cuda.cuh"
#include "launch/runtime.cuh"
#include "ops/random/body.hpp"
#include "ops/random/kernels.hpp"

namespace pydist::cuda {
namespace {

template <class T>
void fill(const TensorView& out, const ops::KeyedBox& box, const Queue& queue) {
  const index_t elements = out.elements();
  if (elements == 0) return;
  const DeviceGuard guard(queue.device);
  const index_t run = box.extent[box.ndim - 1];
  check(launch::run_on_cuda(ops::KeyedUniform<T>{static_cast<T*>(out.data), box, elements / run},
                            run, stream_of(queue)),
        "launch of keyed_uniform");
}

}  // namespace

void keyed_uniform(const TensorView& out, const ops::UniformKey& key, const Coords& lo,
                   const Coords& shape, const Queue& queue) {
  const ops::KeyedBox box = ops::keyed_box(out, key, lo, shape);
  if (out.dtype == DType::kFloat32) {
    fill<float>(out, box, queue);
  } else {
    fill<double>(out, box, queue);
  }
}

}  // namespace pydist::cuda
