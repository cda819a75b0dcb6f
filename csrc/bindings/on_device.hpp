// Code shared by the kernels' bindings: the choice of the backend, and a check of their targets.
//
// A binding borrows tensors, checks them, makes a problem, and ends with
//   on_device(out, [&] { cpu::kernel(problem); }, PYDIST_ON_CUDA(kernel(problem, queue)));
#pragma once

#include <string>

#include "bindings/tensor_border.hpp"
#include "launch/device.hpp"

namespace pydist::bindings {

// Runs a kernel on the backend of the tensors' device: on_cpu(), or on_cuda(queue) with the current
// stream of the caller's framework. Call after all checks; the GIL is released.
template <class OnCpu, class OnCuda>
void on_device(const Borrowed& tensor, const OnCpu& on_cpu, [[maybe_unused]] OnCuda on_cuda) {
  if (tensor->device.type == DeviceType::kCpu) {
    const py::gil_scoped_release unlocked;
    on_cpu();
    return;
  }
#ifdef PYDIST_HAS_CUDA
  const cuda::Queue queue{tensor->device.index, tensor.stream()};
  const py::gil_scoped_release unlocked;
  on_cuda(queue);
#else
  throw UsageError("a tensor is on " + to_string(tensor->device) +
                   ", and this build of pydist has no CUDA kernels: install it where nvcc is "
                   "found, or with PYDIST_CUDA=ON");
#endif
}

// The CUDA side of a kernel, absent in builds without CUDA.
#ifdef PYDIST_HAS_CUDA
#define PYDIST_ON_CUDA(call) [&](const cuda::Queue& queue) { cuda::call; }
#else
#define PYDIST_ON_CUDA(call) nullptr
#endif

// Refuses an expanded tensor: its elements share memory, so writes would not be independent.
inline void check_writable(const char* name, const TensorView& view) {
  for (int dim = 0; dim < view.ndim(); ++dim) {
    PYDIST_EXPECT(view.strides[dim] != 0 || view.shape[dim] <= 1,
                  describe(name, view) + " has stride 0 in dim " + std::to_string(dim) +
                      ": an expanded tensor can't be written to; clone it first");
  }
}

}  // namespace pydist::bindings
