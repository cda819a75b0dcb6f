// The hardware of the kernels, for Python: devices, threads, the instruction set.
#include "bindings/bindings.hpp"
#include "isa/isa.hpp"
#include "launch/device.hpp"
#include "launch/thread_pool.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;

void bind_cuda(py::module_& module) {
#ifdef PYDIST_HAS_CUDA
  constexpr bool kHasCuda = true;
  const auto device_count = [] { return cuda::device_count(); };
#else
  constexpr bool kHasCuda = false;
  const auto device_count = [] { return 0; };
#endif
  module.attr("has_cuda") = kHasCuda;
  module.def("cuda_device_count", device_count,
             "CUDA devices that this process can use; 0 without a driver or CUDA kernels.");
}

}  // namespace

void bind_hardware(py::module_& module) {
  module.def(
      "cpu_isa", [] { return isa::name(); },
      "The instruction set that the CPU kernels use; PYDIST_ISA lowers it.");
  bind_cuda(module);
  module.def("set_num_threads", &launch::set_num_threads, "threads"_a,
             "Threads that one kernel may use, in the whole process; results never depend on it.");
  module.def("get_num_threads", &launch::num_threads);
}

}  // namespace pydist::bindings
