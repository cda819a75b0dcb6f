// Sums and maxima over pooling windows for Python: checks at the border, then the tensors' backend.
#include <pybind11/stl.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/on_device.hpp"
#include "ops/pool/kernels.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;
using ops::kSpatialDims;
using ops::MaxProblem;
using ops::PoolAttributes;
using ops::PoolProblem;
using Footprints = std::vector<Footprint>;

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

// Two arrays [N, C, 3 spatial dims] of one pooling.
void check_arrays(const char* name, const TensorView& view, const char* other_name,
                  const TensorView& other, const PoolAttributes& attributes) {
  require_ndim(name, view, 2 + kSpatialDims);
  require_ndim(other_name, other, 2 + kSpatialDims);
  require_same_device(name, view, other_name, other);
  PYDIST_EXPECT(view.shape[0] == other.shape[0] && view.shape[1] == other.shape[1],
                describe(name, view) + ", " + describe(other_name, other) +
                    ": both need the same number of samples and channels");
  for (const Coords* coords : {&attributes.in_lo, &attributes.out_lo}) {
    PYDIST_EXPECT(coords->ndim() == kSpatialDims,
                  to_string(*coords) + ": a position has one entry for each of the 3 spatial dims");
  }
  PYDIST_EXPECT(attributes.footprints.size() == kSpatialDims,
                std::to_string(attributes.footprints.size()) +
                    " footprints given; it needs one for each of the 3 spatial dims");
}

void check_values(const char* name, const TensorView& view, const char* other_name,
                  const TensorView& other) {
  require_same_dtype(name, view, other_name, other);
  PYDIST_EXPECT(is_floating(view.dtype),
                describe(name, view) + "; possible are float16, bfloat16, float32 and float64");
}

// Sums have no dilation: their bodies take the inputs of a window as one interval per dim.
PoolProblem check_pool(const TensorView& in, const TensorView& out,
                       const PoolAttributes& attributes, const std::vector<Borrowed>& scales,
                       bool accumulate) {
  for (const Footprint& footprint : attributes.footprints) {
    PYDIST_EXPECT(
        footprint.dilation() == 1,
        "sums over windows of dilation " + std::to_string(footprint.dilation()) + ": it must be 1");
  }
  const double* data[kSpatialDims];
  for (std::size_t dim = 0; dim < kSpatialDims; ++dim) {
    data[dim] = static_cast<const double*>(scales[dim]->data);
  }
  return ops::pool_problem(in, out, attributes, data, accumulate);
}

// The slope of a fused ReLU.
void set_slope(PoolProblem& problem, double negative_slope) {
  PYDIST_EXPECT(negative_slope >= 0 && negative_slope <= 1,
                "a negative slope of " + std::to_string(negative_slope) + ": 0 to 1 is possible");
  problem.slope = negative_slope;
}

void pool_forward(py::handle source, py::handle out, const Coords& source_lo, const Coords& out_lo,
                  const Footprints& footprints, const py::sequence& scales, bool accumulate,
                  double negative_slope) {
  const Borrowed in = borrow(source, "source"), y = borrow(out, "out", Access::kWrite);
  const PoolAttributes attributes{source_lo, out_lo, footprints};
  check_arrays("source", in.view(), "out", y.view(), attributes);
  check_values("source", in.view(), "out", y.view());
  const std::vector<Borrowed> factors = borrow_scales(scales, "out", y.view());
  PoolProblem problem = check_pool(in.view(), y.view(), attributes, factors, accumulate);
  set_slope(problem, negative_slope);
  check_writable("out", y.view());
  on_device(
      y, [&] { cpu::pool_sum_forward(problem); }, PYDIST_ON_CUDA(pool_sum_forward(problem, queue)));
}

// A gate is read at the offsets of the target, so it needs the same strides.
void check_gate(const TensorView& gate, const TensorView& target) {
  require_same_dtype("gate", gate, "source_grad", target);
  require_same_device("gate", gate, "source_grad", target);
  bool same_layout = gate.shape == target.shape;
  for (int dim = 0; same_layout && dim < gate.ndim(); ++dim) {
    same_layout = gate.shape[dim] == 1 || gate.strides[dim] == target.strides[dim];
  }
  PYDIST_EXPECT(same_layout, describe("gate", gate) + ", " + describe("source_grad", target) +
                                 ": they must have one shape and the same strides");
}

void pool_backward(py::handle grad, py::handle source_grad, const Coords& out_lo,
                   const Coords& source_lo, const Footprints& footprints,
                   const py::sequence& scales, bool accumulate, py::handle gate,
                   double negative_slope) {
  const Borrowed y = borrow(grad, "grad"), in = borrow(source_grad, "source_grad", Access::kWrite);
  const PoolAttributes attributes{source_lo, out_lo, footprints};
  check_arrays("source_grad", in.view(), "grad", y.view(), attributes);
  check_values("source_grad", in.view(), "grad", y.view());
  const std::vector<Borrowed> factors = borrow_scales(scales, "grad", y.view());
  PoolProblem problem = check_pool(in.view(), y.view(), attributes, factors, accumulate);
  set_slope(problem, negative_slope);
  PYDIST_EXPECT(gate.is_none() == (negative_slope == 1),
                "a gate and a negative slope below 1 come together");
  std::optional<Borrowed> values;
  if (!gate.is_none()) {
    values.emplace(borrow(gate, "gate"));
    check_gate(values->view(), in.view());
    problem.gate = (*values)->data;
  }
  check_writable("source_grad", in.view());
  on_device(
      in, [&] { cpu::pool_sum_backward(problem); },
      PYDIST_ON_CUDA(pool_sum_backward(problem, queue)));
}

// `out_name` is the array of outputs or of their gradient, to which the taps belong.
MaxProblem check_max(const char* in_name, const TensorView& in, const char* out_name,
                     const TensorView& out, const TensorView& taps,
                     const PoolAttributes& attributes, bool accumulate) {
  check_arrays(in_name, in, out_name, out, attributes);
  check_values(in_name, in, out_name, out);
  require_same_device(out_name, out, "taps", taps);
  PYDIST_EXPECT(taps.dtype == DType::kUInt8 || taps.dtype == DType::kInt32,
                describe("taps", taps) + "; possible are uint8 and int32");
  PYDIST_EXPECT(taps.shape == out.shape,
                describe("taps", taps) + ", " + describe(out_name, out) + ": shapes must be equal");
  index_t volume = 1;
  for (const Footprint& footprint : attributes.footprints) {
    volume = checked_mul(volume, footprint.kernel());
  }
  const index_t most = taps.dtype == DType::kUInt8 ? std::numeric_limits<std::uint8_t>::max()
                                                   : std::numeric_limits<std::int32_t>::max();
  PYDIST_EXPECT(volume <= most, describe("taps", taps) + " can't number the " +
                                    std::to_string(volume) + " taps of a window");
  return ops::max_problem(in, out, taps, attributes, accumulate);
}

void max_forward(py::handle source, py::handle out, py::handle taps, const Coords& source_lo,
                 const Coords& out_lo, const Footprints& footprints, bool accumulate) {
  const Borrowed in = borrow(source, "source"), y = borrow(out, "out", Access::kWrite),
                 taken = borrow(taps, "taps", Access::kWrite);
  const MaxProblem problem = check_max("source", in.view(), "out", y.view(), taken.view(),
                                       {source_lo, out_lo, footprints}, accumulate);
  check_writable("out", y.view());
  check_writable("taps", taken.view());
  on_device(
      y, [&] { cpu::pool_max_forward(problem); }, PYDIST_ON_CUDA(pool_max_forward(problem, queue)));
}

void max_backward(py::handle grad, py::handle taps, py::handle source_grad, const Coords& out_lo,
                  const Coords& source_lo, const Footprints& footprints) {
  const Borrowed y = borrow(grad, "grad"), taken = borrow(taps, "taps"),
                 in = borrow(source_grad, "source_grad", Access::kWrite);
  const MaxProblem problem = check_max("source_grad", in.view(), "grad", y.view(), taken.view(),
                                       {source_lo, out_lo, footprints}, false);
  check_writable("source_grad", in.view());
  on_device(
      in, [&] { cpu::pool_max_backward(problem); },
      PYDIST_ON_CUDA(pool_max_backward(problem, queue)));
}

void max_pick(py::handle source, py::handle taps, py::handle out, const Coords& source_lo,
              const Coords& out_lo, const Footprints& footprints, bool accumulate) {
  const Borrowed in = borrow(source, "source"), taken = borrow(taps, "taps"),
                 y = borrow(out, "out", Access::kWrite);
  const MaxProblem problem = check_max("source", in.view(), "out", y.view(), taken.view(),
                                       {source_lo, out_lo, footprints}, accumulate);
  check_writable("out", y.view());
  on_device(y, [&] { cpu::pool_max_pick(problem); }, PYDIST_ON_CUDA(pool_max_pick(problem, queue)));
}

}  // namespace

void bind_pool(py::module_& module) {
  module.def(
      "pool_sum_forward", &pool_forward, "source"_a, "out"_a, "source_lo"_a, "out_lo"_a,
      "footprints"_a, "scales"_a, "accumulate"_a, "negative_slope"_a = 1.0,
      "out = (or +=) the scaled sums over pooling windows, of the inputs in `source`.\n\n"
      "out[n, c, o] = scale(o) * the sum of source[n, c, i] over the inputs i that output o reads\n"
      "by its footprints, of the inputs and outputs that lie in the given arrays; o and i are\n"
      "global. scale(o) = scales[0][o_d] * scales[1][o_h] * scales[2][o_w], by local index.\n\n"
      "Args:\n"
      "    source: inputs [N, C, *s]; element 0 has the global coordinates `source_lo`.\n"
      "    out: [N, C, *o]; element 0 has the global output coordinates `out_lo`.\n"
      "    footprints: one a spatial dim, without dilation.\n"
      "    scales: a float64 array for each spatial dim, as long as `out` is along it.\n"
      "    accumulate: add to `out`, and leave alone what no input reaches; else all of `out`\n"
      "        is written, with 0 there.\n"
      "    negative_slope: by which inputs below 0 are taken, as by a leaky ReLU.");
  module.def(
      "pool_sum_backward", &pool_backward, "grad"_a, "source_grad"_a, "out_lo"_a, "source_lo"_a,
      "footprints"_a, "scales"_a, "accumulate"_a, "gate"_a = py::none(), "negative_slope"_a = 1.0,
      "source_grad = (or +=) what a piece of the outputs' gradient gives to the inputs'.\n\n"
      "The adjoint of pool_sum_forward: `grad` [N, C, *o] begins at the output coordinates\n"
      "`out_lo` and `scales` belong to its outputs; `source_grad` [N, C, *s] begins at the input\n"
      "coordinates `source_lo`. `gate`, of the shape and strides of `source_grad`, is what "
      "forward\n"
      "took through the leaky ReLU, or what came out: where it is not above 0, the negative slope\n"
      "is a factor of what is added up.");
  module.def(
      "pool_max_forward", &max_forward, "source"_a, "out"_a, "taps"_a, "source_lo"_a, "out_lo"_a,
      "footprints"_a, "accumulate"_a,
      "out, taps = the maxima over pooling windows, of the inputs in `source`, and their places.\n"
      "\n"
      "A tap is the number of an input in its window, in C order of the windows' kernels. torch's\n"
      "choice: of NaNs the last, else of equal maxima the first. Outputs that reach no input get\n"
      "-inf and the largest number of the taps' dtype.\n\n"
      "Args:\n"
      "    source: inputs [N, C, *s]; element 0 has the global coordinates `source_lo`.\n"
      "    out: [N, C, *o]; element 0 has the global output coordinates `out_lo`.\n"
      "    taps: uint8 or int32, of the shape of `out`.\n"
      "    footprints: one a spatial dim.\n"
      "    accumulate: merge with what `out` and `taps` hold already, of other inputs.");
  module.def(
      "pool_max_backward", &max_backward, "grad"_a, "taps"_a, "source_grad"_a, "out_lo"_a,
      "source_lo"_a, "footprints"_a,
      "source_grad = what a piece of the outputs' gradient gives to the inputs at its taps.\n\n"
      "`grad` and `taps` [N, C, *o] begin at the output coordinates `out_lo`; `source_grad`\n"
      "[N, C, *s] begins at the input coordinates `source_lo`, and all of it is written.");
  module.def(
      "pool_max_pick", &max_pick, "source"_a, "taps"_a, "out"_a, "source_lo"_a, "out_lo"_a,
      "footprints"_a, "accumulate"_a,
      "out = the inputs at the taps: the adjoint of pool_max_backward.\n\n"
      "Where the input is not in `source`, `out` becomes 0; with `accumulate` it is left alone.");
}

}  // namespace pydist::bindings
