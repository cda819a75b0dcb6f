// The Python module pydist._native. It links neither torch nor MPI nor a shared CUDA library.
//
// Errors: UsageError becomes pydist.errors.UsageError; the bindings of comm and packs translate
// their own. For others the rules of pybind11 hold: InternalError becomes RuntimeError,
// std::bad_alloc MemoryError, and std::invalid_argument ValueError.
#include <exception>
#include <utility>

#include "bindings/bindings.hpp"
#include "bindings/tensor_border.hpp"
#include "core/errors.hpp"

namespace py = pybind11;

// The kernel families: families.inc has PYDIST_FAMILY(pool) and so on, a line for each folder in
// csrc/ops. CMake writes it (cmake/PydistFamily.cmake).
#define PYDIST_FAMILY(name)              \
  namespace pydist::bindings {           \
  void bind_##name(py::module_& module); \
  }
#include "bindings/families.inc"
#undef PYDIST_FAMILY

namespace {

void translate(std::exception_ptr error) {
  using pydist::bindings::error_type;
  try {
    std::rethrow_exception(std::move(error));
  } catch (const pydist::UsageError& fault) {
    py::set_error(error_type("UsageError"), fault.what());
  }
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Native core of pydist: geometry, exchange plans, kernels.";
  py::register_local_exception_translator(translate);
  module.attr("__version__") = PYDIST_VERSION;
  pydist::bindings::bind_core(module);
  pydist::bindings::bind_tensor_border(module);
  pydist::bindings::bind_io(module);
  pydist::bindings::bind_packs(module);
  pydist::bindings::bind_hardware(module);
  pydist::bindings::bind_call_board(module);
  pydist::bindings::bind_calls(module);
  pydist::bindings::bind_comm(module);
  pydist::bindings::bind_nccl(module);
  pydist::bindings::bind_ipc(module);
  pydist::bindings::bind_watchdog(module);
#define PYDIST_FAMILY(name) pydist::bindings::bind_##name(module);
#include "bindings/families.inc"
#undef PYDIST_FAMILY
}
