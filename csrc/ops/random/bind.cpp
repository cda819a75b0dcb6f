// Random numbers for Python.
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>

#include "bindings/bindings.hpp"
#include "bindings/coords_caster.hpp"
#include "bindings/on_device.hpp"
#include "bindings/tensor_border.hpp"
#include "ops/random/kernels.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;

void keyed_uniform(py::handle tensor, py::handle key_or_tensor, const Coords& lo,
                   const Coords& shape) {
  const Borrowed out = borrow(tensor, "out", Access::kWrite);
  const TensorView& view = out.view();
  PYDIST_EXPECT(view.dtype == DType::kFloat32 || view.dtype == DType::kFloat64,
                describe("out", view) + "; possible are float32 and float64");
  PYDIST_EXPECT(lo.ndim() == view.ndim() && shape.ndim() == view.ndim() && view.ndim() >= 1,
                describe("out", view) + ", lo " + to_string(lo) + ", shape " + to_string(shape) +
                    ": all need the same number of dims, at least 1");
  for (int dim = 0; dim < view.ndim(); ++dim) {
    PYDIST_EXPECT(lo[dim] >= 0 && checked_add(lo[dim], view.shape[dim]) <= shape[dim],
                  describe("out", view) + " at lo " + to_string(lo) +
                      " does not lie in the global shape " + to_string(shape));
  }
  ops::UniformKey key;
  std::optional<Borrowed> held;
  if (py::isinstance<py::int_>(key_or_tensor)) {
    key.value = key_or_tensor.cast<std::uint64_t>();
  } else {
    held.emplace(borrow(key_or_tensor, "key"));
    const TensorView& at = held->view();
    PYDIST_EXPECT(at.dtype == DType::kInt64 && at.elements() == 1,
                  describe("key", at) + ": an int, or a tensor of one int64 is needed");
    require_same_device("key", at, "out", view);
    key.at = static_cast<const std::uint64_t*>(at.data);
  }
  volume_of(shape);  // refuses shapes whose indices do not fit into the counter
  check_writable("out", view);
  on_device(
      out, [&] { cpu::keyed_uniform(view, key, lo, shape); },
      PYDIST_ON_CUDA(keyed_uniform(view, key, lo, shape, queue)));
}

}  // namespace

void bind_random(py::module_& module) {
  module.def(
      "keyed_uniform", &keyed_uniform, "out"_a, "key"_a, "lo"_a, "shape"_a,
      "out[i] = U[0, 1), a function of `key` and of the global index lo + i alone.\n\n"
      "Philox4x32-10 with the 64-bit `key`, an int or a tensor of one int64 beside `out`, which\n"
      "is read when the kernel runs; its counter is the index of lo + i in C order of\n"
      "the global `shape`, so that the numbers do not depend on how an array is cut.");
}

}  // namespace pydist::bindings
