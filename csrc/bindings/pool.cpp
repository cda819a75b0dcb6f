// Sums over pooling windows for Python.
#include "cpu/pool.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/on_device.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;
using kernels::kSpatialDims;
using kernels::PoolAttributes;
using kernels::PoolProblem;

// The scales of the outputs along each spatial dim, borrowed for one call.
std::vector<Borrowed> borrow_scales(const py::sequence& scales, const char* name,
                                    const TensorView& out) {
  PYDIST_EXPECT(scales.size() == kSpatialDims,
                "scales has " + std::to_string(scales.size()) +
                    " arrays; it needs one for each of the 3 spatial dims");
  std::vector<Borrowed> borrowed;
  borrowed.reserve(kSpatialDims);
  for (int dim = 0; dim < kSpatialDims; ++dim) {
    const std::string label = "scales[" + std::to_string(dim) + "]";
    borrowed.push_back(borrow(py::object(scales[static_cast<std::size_t>(dim)]), label.c_str()));
    const TensorView& view = borrowed.back().view();
    require_ndim(label.c_str(), view, 1);
    require_contiguous(label.c_str(), view);
    require_same_device(label.c_str(), view, name, out);
    PYDIST_EXPECT(view.dtype == DType::kFloat64 && view.shape[0] == out.shape[2 + dim],
                  describe(label.c_str(), view) + ", " + describe(name, out) +
                      ": scales are float64, one for each output along the dim");
  }
  return borrowed;
}

PoolProblem check_pool(const char* in_name, const TensorView& in, const char* out_name,
                       const TensorView& out, const PoolAttributes& attributes,
                       const std::vector<Borrowed>& scales, bool accumulate) {
  PYDIST_EXPECT(is_floating(in.dtype),
                describe(in_name, in) + "; possible are float16, bfloat16, float32 and float64");
  PYDIST_EXPECT(in.shape[0] == out.shape[0] && in.shape[1] == out.shape[1],
                describe(in_name, in) + ", " + describe(out_name, out) +
                    ": both need the same number of samples and channels");
  for (const Coords* coords : {&attributes.in_lo, &attributes.out_lo, &attributes.kernel,
                               &attributes.stride, &attributes.padding}) {
    PYDIST_EXPECT(coords->ndim() == kSpatialDims,
                  to_string(*coords) +
                      ": positions, kernel, stride and padding have one entry for each of the 3 "
                      "spatial dims");
  }
  for (int dim = 0; dim < kSpatialDims; ++dim) {
    PYDIST_EXPECT(attributes.kernel[dim] >= 1 && attributes.stride[dim] >= 1,
                  "kernel " + to_string(attributes.kernel) + " and stride " +
                      to_string(attributes.stride) + " must be at least 1");
  }
  const double* data[kSpatialDims];
  for (std::size_t dim = 0; dim < kSpatialDims; ++dim) {
    data[dim] = static_cast<const double*>(scales[dim]->data);
  }
  return kernels::pool_problem(in, out, attributes, data, accumulate);
}

void check_arrays(const char* name, const TensorView& view, const char* other_name,
                  const TensorView& other) {
  require_ndim(name, view, 2 + kSpatialDims);
  require_ndim(other_name, other, 2 + kSpatialDims);
  require_same_dtype(name, view, other_name, other);
  require_same_device(name, view, other_name, other);
}

void pool_forward(py::handle source, py::handle out, const Coords& source_lo, const Coords& out_lo,
                  const Coords& kernel, const Coords& stride, const Coords& padding,
                  const py::sequence& scales, bool accumulate) {
  const Borrowed in = borrow(source, "source"), y = borrow(out, "out", Access::kWrite);
  check_arrays("source", in.view(), "out", y.view());
  const std::vector<Borrowed> factors = borrow_scales(scales, "out", y.view());
  const PoolProblem problem =
      check_pool("source", in.view(), "out", y.view(), {source_lo, out_lo, kernel, stride, padding},
                 factors, accumulate);
  check_writable("out", y.view());
  on_device(
      y, [&] { cpu::pool_sum_forward(problem); }, PYDIST_ON_CUDA(pool_sum_forward(problem, queue)));
}

void pool_backward(py::handle grad, py::handle source_grad, const Coords& out_lo,
                   const Coords& source_lo, const Coords& kernel, const Coords& stride,
                   const Coords& padding, const py::sequence& scales, bool accumulate) {
  const Borrowed y = borrow(grad, "grad"), in = borrow(source_grad, "source_grad", Access::kWrite);
  check_arrays("grad", y.view(), "source_grad", in.view());
  const std::vector<Borrowed> factors = borrow_scales(scales, "grad", y.view());
  const PoolProblem problem =
      check_pool("source_grad", in.view(), "grad", y.view(),
                 {source_lo, out_lo, kernel, stride, padding}, factors, accumulate);
  check_writable("source_grad", in.view());
  on_device(
      in, [&] { cpu::pool_sum_backward(problem); },
      PYDIST_ON_CUDA(pool_sum_backward(problem, queue)));
}

}  // namespace

void bind_pool(py::module_& module) {
  module.def(
      "pool_sum_forward", &pool_forward, "source"_a, "out"_a, "source_lo"_a, "out_lo"_a, "kernel"_a,
      "stride"_a, "padding"_a, "scales"_a, "accumulate"_a,
      "out = (or +=) the scaled sums over pooling windows, of the inputs in `source`.\n\n"
      "out[n, c, o] = scale(o) * sum_k source[n, c, o * stride - padding + k], 0 <= k < kernel,\n"
      "over the inputs and outputs that lie in the given arrays; o and the inputs' index are\n"
      "global. scale(o) = scales[0][o_d] * scales[1][o_h] * scales[2][o_w], by local index.\n\n"
      "Args:\n"
      "    source: inputs [N, C, *s]; element 0 has the global coordinates `source_lo`.\n"
      "    out: [N, C, *o]; element 0 has the global output coordinates `out_lo`.\n"
      "    scales: a float64 array for each spatial dim, as long as `out` is along it.\n"
      "    accumulate: add to `out`, and leave alone what no input reaches; else all of `out`\n"
      "        is written, with 0 there.");
  module.def(
      "pool_sum_backward", &pool_backward, "grad"_a, "source_grad"_a, "out_lo"_a, "source_lo"_a,
      "kernel"_a, "stride"_a, "padding"_a, "scales"_a, "accumulate"_a,
      "source_grad = (or +=) what a piece of the outputs' gradient gives to the inputs'.\n\n"
      "The adjoint of pool_sum_forward: `grad` [N, C, *o] begins at the output coordinates\n"
      "`out_lo` and `scales` belong to its outputs; `source_grad` [N, C, *s] begins at the input\n"
      "coordinates `source_lo`.");
}

}  // namespace pydist::bindings
