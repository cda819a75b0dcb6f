// Boundary convolution for Python: checks at the border, then the backend and the requested kernel.
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>

#include "bindings/bindings.hpp"
#include "bindings/coords_caster.hpp"
#include "bindings/on_device.hpp"
#include "bindings/tensor_border.hpp"
#include "ops/conv/kernels.hpp"
#include "ops/conv/mma_choice.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;

// One of the three arrays of a boundary convolution, with its Python name for messages.
struct ConvArgument {
  const char* name;
  const Borrowed& tensor;

  const TensorView& view() const { return tensor.view(); }
  std::string describe() const { return bindings::describe(name, view()); }
};

void check_attributes(const ops::ConvAttributes& attributes) {
  for (const Coords* coords : {&attributes.in_lo, &attributes.out_lo, &attributes.stride,
                               &attributes.padding, &attributes.dilation}) {
    PYDIST_EXPECT(coords->ndim() == ops::kSpatialDims,
                  to_string(*coords) +
                      ": positions, stride, padding and dilation have one entry "
                      "for each of the 3 spatial dims");
  }
  for (int dim = 0; dim < ops::kSpatialDims; ++dim) {
    PYDIST_EXPECT(attributes.stride[dim] >= 1 && attributes.dilation[dim] >= 1,
                  "stride " + to_string(attributes.stride) + " and dilation " +
                      to_string(attributes.dilation) + " must be at least 1");
  }
}

// All that the kernels assume of their arrays: [N, C, D, H, W] of one floating-point dtype on one
// device, channels and samples that fit. Strides may be any; positions that would overflow are
// refused by conv_problem. Later code has no checks.
ops::ConvProblem check_conv(const ConvArgument& in, const ConvArgument& weight,
                            const ConvArgument& out, const ops::ConvAttributes& attributes) {
  for (const ConvArgument* array : {&in, &weight, &out}) {
    require_ndim(array->name, array->view(), 5);
    require_same_dtype(array->name, array->view(), in.name, in.view());
    require_same_device(array->name, array->view(), in.name, in.view());
  }
  PYDIST_EXPECT(is_floating(in.view().dtype),
                in.describe() + "; possible are float16, bfloat16, float32 and float64");
  check_attributes(attributes);
  const Coords &x = in.view().shape, &w = weight.view().shape, &y = out.view().shape;
  const index_t groups = attributes.groups;
  PYDIST_EXPECT(groups >= 1 && w[0] % groups == 0 && x[1] == groups * w[1] && y[1] == w[0],
                in.describe() + ", " + weight.describe() + ", " + out.describe() +
                    ": their channels do not fit for groups=" + std::to_string(groups));
  PYDIST_EXPECT(x[0] == y[0], in.describe() + " and " + out.describe() +
                                  ": both need the same number of samples");
  return ops::conv_problem(in.view(), weight.view(), out.view(), attributes);
}

using ops::ConvMath;
using ops::ConvOp;

ConvMath math_of(const std::string& kernel) {
  return kernel == "tf32" ? ConvMath::kTf32 : ConvMath::kTf32x3;
}

// (why there is no tensor-core kernel, floats of workspace, the useful fraction of its
// multiply-adds)
using MmaPlan = std::tuple<std::string, index_t, double>;

// Computed on the host from shapes and strides, without a launch: Python asks before it chooses.
template <ConvOp kOp>
MmaPlan plan_of(const ops::ConvProblem& problem, const std::string& kernel) {
  MmaPlan plan{ops::mma_refusal<kOp>(problem), 0, 0};
  if (!std::get<0>(plan).empty()) return plan;
  ops::with_mma_body<kOp>(problem, math_of(kernel), [&]<class Body>(std::type_identity<Body>) {
    const Body body = Body::make(problem, nullptr);
    plan = {"", body.partial_elements(), body.blocks() == 0 ? 1.0 : body.useful()};
  });
  return plan;
}

// The call of the kernel that Python requests; nothing for `plain`. Refuses a kernel that does not
// exist for the problem or the device, and a workspace that is too small.
template <ConvOp kOp>
std::optional<ops::MmaCall> check_kernel(const ops::ConvProblem& problem, const std::string& kernel,
                                         const py::object& workspace, const ConvArgument& target) {
  PYDIST_EXPECT(kernel == "plain" || kernel == "mma" || kernel == "tf32",
                "kernel '" + kernel + "'; possible are plain, mma and tf32");
  if (kernel == "plain") return std::nullopt;
  const Device device = target.view().device;
  PYDIST_EXPECT(device.type == DeviceType::kCuda,
                "kernel '" + kernel + "' is for tensor cores, and " + target.describe() +
                    ": there, kernel 'plain' is possible");
  const auto [refusal, needed, useful] = plan_of<kOp>(problem, kernel);
  PYDIST_EXPECT(refusal.empty(),
                "kernel '" + kernel + "' does not take " + refusal + "; kernel 'plain' does");
  if (needed == 0) return ops::MmaCall{math_of(kernel), nullptr};
  PYDIST_EXPECT(!workspace.is_none(), "kernel '" + kernel + "' needs a workspace of " +
                                          std::to_string(needed) + " float32");
  const Borrowed room = borrow(workspace, "workspace", Access::kWrite);
  require_same_device("workspace", room.view(), target.name, target.view());
  require_contiguous("workspace", room.view());
  PYDIST_EXPECT(
      room->dtype == DType::kFloat32 && room->elements() >= needed,
      describe("workspace", room.view()) + "; needed are " + std::to_string(needed) + " float32");
  return ops::MmaCall{math_of(kernel), static_cast<float*>(room->data)};
}

void conv_forward(py::handle slab, py::handle weight, py::handle out, const Coords& slab_lo,
                  const Coords& out_lo, const Coords& stride, const Coords& padding,
                  const Coords& dilation, index_t groups, const std::string& kernel,
                  const py::object& workspace) {
  const Borrowed in = borrow(slab, "slab"), w = borrow(weight, "weight");
  const Borrowed y = borrow(out, "out", Access::kWrite);
  const auto problem = check_conv({"slab", in}, {"weight", w}, {"out", y},
                                  {slab_lo, out_lo, stride, padding, dilation, groups});
  check_writable("out", y.view());
  [[maybe_unused]] const auto mma =
      check_kernel<ConvOp::kForward>(problem, kernel, workspace, {"out", y});
  on_device(
      y, [&] { cpu::boundary_conv_forward(problem); },
      PYDIST_ON_CUDA(boundary_conv_forward(problem, mma, queue)));
}

void conv_dgrad(py::handle grad_slab, py::handle weight, py::handle grad_in, const Coords& slab_lo,
                const Coords& in_lo, const Coords& stride, const Coords& padding,
                const Coords& dilation, index_t groups, const std::string& kernel,
                const py::object& workspace) {
  const Borrowed in = borrow(grad_in, "grad_in", Access::kWrite), w = borrow(weight, "weight");
  const Borrowed y = borrow(grad_slab, "grad_slab");
  const auto problem = check_conv({"grad_in", in}, {"weight", w}, {"grad_slab", y},
                                  {in_lo, slab_lo, stride, padding, dilation, groups});
  check_writable("grad_in", in.view());
  [[maybe_unused]] const auto mma =
      check_kernel<ConvOp::kDgrad>(problem, kernel, workspace, {"grad_in", in});
  on_device(
      in, [&] { cpu::boundary_conv_dgrad(problem); },
      PYDIST_ON_CUDA(boundary_conv_dgrad(problem, mma, queue)));
}

void conv_wgrad(py::handle slab, py::handle grad_out, py::handle grad_weight, const Coords& slab_lo,
                const Coords& out_lo, const Coords& stride, const Coords& padding,
                const Coords& dilation, index_t groups, const std::string& kernel,
                const py::object& workspace) {
  const Borrowed in = borrow(slab, "slab"), y = borrow(grad_out, "grad_out");
  const Borrowed w = borrow(grad_weight, "grad_weight", Access::kWrite);
  const auto problem = check_conv({"slab", in}, {"grad_weight", w}, {"grad_out", y},
                                  {slab_lo, out_lo, stride, padding, dilation, groups});
  check_writable("grad_weight", w.view());
  [[maybe_unused]] const auto mma =
      check_kernel<ConvOp::kWgrad>(problem, kernel, workspace, {"grad_weight", w});
  on_device(
      w, [&] { cpu::boundary_conv_wgrad(problem); },
      PYDIST_ON_CUDA(boundary_conv_wgrad(problem, mma, queue)));
}

MmaPlan mma_plan(const std::string& op, py::handle first, py::handle second, py::handle target,
                 const Coords& first_lo, const Coords& target_lo, const Coords& stride,
                 const Coords& padding, const Coords& dilation, index_t groups,
                 const std::string& kernel) {
  PYDIST_EXPECT(kernel == "mma" || kernel == "tf32",
                "kernel '" + kernel + "'; tensor-core kernels are mma and tf32");
  const Borrowed a = borrow(first, "first"), b = borrow(second, "second");
  const Borrowed c = borrow(target, "target");
  const ops::ConvAttributes along{first_lo, target_lo, stride, padding, dilation, groups};
  if (op == "forward") {
    return plan_of<ConvOp::kForward>(check_conv({"slab", a}, {"weight", b}, {"out", c}, along),
                                     kernel);
  }
  if (op == "wgrad") {
    return plan_of<ConvOp::kWgrad>(
        check_conv({"slab", a}, {"grad_weight", c}, {"grad_out", b}, along), kernel);
  }
  PYDIST_EXPECT(op == "dgrad", "op '" + op + "'; possible are forward, dgrad and wgrad");
  return plan_of<ConvOp::kDgrad>(
      check_conv({"grad_in", c}, {"weight", b}, {"grad_slab", a},
                 {target_lo, first_lo, stride, padding, dilation, groups}),
      kernel);
}

}  // namespace

void bind_conv(py::module_& module) {
  module.def(
      "boundary_conv_forward", &conv_forward, "slab"_a, "weight"_a, "out"_a, "slab_lo"_a,
      "out_lo"_a, "stride"_a, "padding"_a, "dilation"_a, "groups"_a, "kernel"_a = "plain",
      "workspace"_a = py::none(),
      "out += what the inputs in `slab` contribute to a 3-D convolution.\n\n"
      "out[o] += sum_k weight[k] * in[o * stride - padding + k * dilation], over the inputs\n"
      "and outputs that lie in the given arrays.\n\n"
      "Args:\n"
      "    slab: inputs [N, Ci, *s]; element 0 has the global coordinates `slab_lo`.\n"
      "    weight: [Co, Ci / groups, *kernel].\n"
      "    out: [N, Co, *o]; element 0 has the global output coordinates `out_lo`.\n"
      "    kernel: plain; on CUDA also mma (tensor cores; floats in three products of tf32, with\n"
      "        errors below 2^-19 of a product) or tf32 (tensor cores; floats rounded to tf32).\n"
      "    workspace: float32, as many as boundary_conv_plan says for `kernel`.");
  module.def(
      "boundary_conv_dgrad", &conv_dgrad, "grad_slab"_a, "weight"_a, "grad_in"_a, "slab_lo"_a,
      "in_lo"_a, "stride"_a, "padding"_a, "dilation"_a, "groups"_a, "kernel"_a = "plain",
      "workspace"_a = py::none(),
      "grad_in += what a slab of the output's gradient contributes to the input's.\n\n"
      "The adjoint of boundary_conv_forward with respect to its inputs: `grad_slab`\n"
      "[N, Co, *s] begins at the output coordinates `slab_lo`, `grad_in` [N, Ci, *i] at the\n"
      "input coordinates `in_lo`.");
  module.def("boundary_conv_wgrad", &conv_wgrad, "slab"_a, "grad_out"_a, "grad_weight"_a,
             "slab_lo"_a, "out_lo"_a, "stride"_a, "padding"_a, "dilation"_a, "groups"_a,
             "kernel"_a = "plain", "workspace"_a = py::none(),
             "grad_weight += what the inputs in `slab` contribute to the weight's gradient.\n\n"
             "The adjoint of boundary_conv_forward with respect to its weight, summed in a fixed\n"
             "order.");
  module.def(
      "boundary_conv_plan", &mma_plan, "op"_a, "first"_a, "second"_a, "target"_a, "first_lo"_a,
      "target_lo"_a, "stride"_a, "padding"_a, "dilation"_a, "groups"_a, "kernel"_a,
      "What a tensor-core kernel of `op` (forward, dgrad or wgrad) would take.\n\n"
      "Args: as of boundary_conv_<op>, on any device; `kernel` is mma or tf32.\n\n"
      "Returns:\n"
      "    Why there is none (empty if there is one), the floats of workspace that it needs, and\n"
      "    the part of the tensor cores' multiply-adds that the result needs.");
}

}  // namespace pydist::bindings
