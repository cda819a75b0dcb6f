// The kernels for Python: checks at the border, then the backend of the tensors' device.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/coords_caster.hpp"
#include "bindings/tensor_border.hpp"
#include "cpu/boundary_conv.hpp"
#include "cpu/isa.hpp"
#include "cpu/pack.hpp"
#include "cpu/uniform.hpp"
#include "kernels/conv_problem.hpp"
#include "kernels/regions.hpp"
#include "launch/thread_pool.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;
using kernels::Regions;

// A view and the buffer of its regions: one dtype, one device, all boxes inside, buffer long enough.
void check_pair(const char* name, const TensorView& view, const Regions& regions,
                const TensorView& buffer) {
  require_same_dtype("buffer", buffer, name, view);
  require_same_device("buffer", buffer, name, view);
  require_ndim("buffer", buffer, 1);
  require_contiguous("buffer", buffer);
  PYDIST_EXPECT(buffer.shape[0] >= regions.elements(),
                describe("buffer", buffer) + "; the regions have " +
                    std::to_string(regions.elements()) + " elements");
  regions.require_inside(view.shape, name);
}

// Refuses an expanded tensor: several of its elements are one, so writes would not be independent.
void check_writable(const char* name, const TensorView& view) {
  for (int dim = 0; dim < view.ndim(); ++dim) {
    PYDIST_EXPECT(view.strides[dim] != 0 || view.shape[dim] <= 1,
                  describe(name, view) + " has stride 0 in dim " + std::to_string(dim) +
                      ": an expanded tensor can't be written to; clone it first");
  }
}

void pack(py::handle src_tensor, const Regions& regions, py::handle buffer_tensor) {
  const Borrowed src = borrow(src_tensor, "src");
  const Borrowed buffer = borrow(buffer_tensor, "buffer", Access::kWrite);
  check_pair("src", src.view(), regions, buffer.view());
  require_cpu("src", src.view());
  const py::gil_scoped_release unlocked;
  cpu::pack(src.view(), regions, buffer.view());
}

void unpack(py::handle buffer_tensor, const Regions& regions, py::handle dst_tensor) {
  const Borrowed buffer = borrow(buffer_tensor, "buffer");
  const Borrowed dst = borrow(dst_tensor, "dst", Access::kWrite);
  check_pair("dst", dst.view(), regions, buffer.view());
  check_writable("dst", dst.view());
  require_cpu("dst", dst.view());
  const py::gil_scoped_release unlocked;
  cpu::unpack(buffer.view(), regions, dst.view());
}

void unpack_add(py::handle buffer_tensor, const Regions& regions, py::handle dst_tensor) {
  const Borrowed buffer = borrow(buffer_tensor, "buffer");
  const Borrowed dst = borrow(dst_tensor, "dst", Access::kWrite);
  check_pair("dst", dst.view(), regions, buffer.view());
  check_writable("dst", dst.view());
  require_cpu("dst", dst.view());
  const py::gil_scoped_release unlocked;
  cpu::unpack_add(buffer.view(), regions, dst.view());
}

void bind_pack(py::module_& module) {
  py::class_<Regions>(module, "Regions", py::is_final(),
                      "Boxes in local indices of a view, one behind the other in a buffer.\n\n"
                      "Each box is contiguous in the buffer, in C order of its indices, whatever\n"
                      "the strides of the view.")
      .def(py::init<const std::vector<Box>&>(), "boxes"_a)
      .def_property_readonly("elements", &Regions::elements, "Elements of all boxes.")
      .def_property_readonly("count", &Regions::count, "Number of boxes.");
  module.def("pack", &pack, "src"_a, "regions"_a, "buffer"_a,
             "buffer[:regions.elements] = the boxes of `src`, which may have any strides.");
  module.def("unpack", &unpack, "buffer"_a, "regions"_a, "dst"_a,
             "The boxes of `dst` = buffer. Where boxes overlap, the last one stays.");
  module.def("unpack_add", &unpack_add, "buffer"_a, "regions"_a, "dst"_a,
             "The boxes of `dst` += buffer, in the boxes' order where they overlap.\n\n"
             "fp16 and bf16 add in fp32, integers wrap, bool is a logical or.");
}

// The shapes, dtypes and attributes of a boundary convolution, named by their Python arguments.
struct ConvArguments {
  const char* in_name;
  const TensorView& in;
  const char* weight_name;
  const TensorView& weight;
  const char* out_name;
  const TensorView& out;
};

void check_conv(const ConvArguments& arrays, const kernels::ConvAttributes& attributes) {
  const auto& [in_name, in, weight_name, weight, out_name, out] = arrays;
  require_ndim(in_name, in, 5);
  require_ndim(weight_name, weight, 5);
  require_ndim(out_name, out, 5);
  PYDIST_EXPECT(is_floating(in.dtype), describe(in_name, in) + "; possible are float16, bfloat16, "
                                                               "float32 and float64");
  require_same_dtype(weight_name, weight, in_name, in);
  require_same_dtype(out_name, out, in_name, in);
  require_same_device(weight_name, weight, in_name, in);
  require_same_device(out_name, out, in_name, in);
  for (const Coords* coords : {&attributes.in_lo, &attributes.out_lo, &attributes.stride,
                               &attributes.padding, &attributes.dilation}) {
    PYDIST_EXPECT(coords->ndim() == kernels::kSpatialDims,
                  to_string(*coords) + ": positions, stride, padding and dilation have one entry "
                                       "for each of the 3 spatial dims");
  }
  const index_t groups = attributes.groups;
  PYDIST_EXPECT(groups >= 1 && in.shape[1] == groups * weight.shape[1] &&
                    out.shape[1] == weight.shape[0] && weight.shape[0] % std::max<index_t>(groups, 1) == 0,
                describe(in_name, in) + ", " + describe(weight_name, weight) + ", " +
                    describe(out_name, out) + ": their channels do not fit for groups=" +
                    std::to_string(groups));
  PYDIST_EXPECT(in.shape[0] == out.shape[0], describe(in_name, in) + " and " +
                                                 describe(out_name, out) +
                                                 ": both need the same number of samples");
  for (int dim = 0; dim < kernels::kSpatialDims; ++dim) {
    PYDIST_EXPECT(attributes.stride[dim] >= 1 && attributes.dilation[dim] >= 1,
                  "stride " + to_string(attributes.stride) + " and dilation " +
                      to_string(attributes.dilation) + " must be at least 1");
  }
}

using ConvKernel = void (*)(const kernels::ConvProblem&);

void run_conv(ConvKernel kernel, const ConvArguments& arrays,
              const kernels::ConvAttributes& attributes) {
  check_conv(arrays, attributes);
  require_cpu(arrays.in_name, arrays.in);
  const py::gil_scoped_release unlocked;
  kernel(kernels::conv_problem(arrays.in, arrays.weight, arrays.out, attributes));
}

void conv_forward(py::handle slab, py::handle weight, py::handle out, const Coords& slab_lo,
                  const Coords& out_lo, const Coords& stride, const Coords& padding,
                  const Coords& dilation, index_t groups) {
  const Borrowed in = borrow(slab, "slab"), w = borrow(weight, "weight");
  const Borrowed y = borrow(out, "out", Access::kWrite);
  check_writable("out", y.view());
  run_conv(&cpu::boundary_conv_forward, {"slab", in.view(), "weight", w.view(), "out", y.view()},
           {slab_lo, out_lo, stride, padding, dilation, groups});
}

void conv_dgrad(py::handle grad_slab, py::handle weight, py::handle grad_in, const Coords& slab_lo,
                const Coords& in_lo, const Coords& stride, const Coords& padding,
                const Coords& dilation, index_t groups) {
  const Borrowed in = borrow(grad_in, "grad_in", Access::kWrite), w = borrow(weight, "weight");
  const Borrowed y = borrow(grad_slab, "grad_slab");
  check_writable("grad_in", in.view());
  run_conv(&cpu::boundary_conv_dgrad,
           {"grad_in", in.view(), "weight", w.view(), "grad_slab", y.view()},
           {in_lo, slab_lo, stride, padding, dilation, groups});
}

void conv_wgrad(py::handle slab, py::handle grad_out, py::handle grad_weight,
                const Coords& slab_lo, const Coords& out_lo, const Coords& stride,
                const Coords& padding, const Coords& dilation, index_t groups) {
  const Borrowed in = borrow(slab, "slab"), y = borrow(grad_out, "grad_out");
  const Borrowed w = borrow(grad_weight, "grad_weight", Access::kWrite);
  check_writable("grad_weight", w.view());
  run_conv(&cpu::boundary_conv_wgrad,
           {"slab", in.view(), "grad_weight", w.view(), "grad_out", y.view()},
           {slab_lo, out_lo, stride, padding, dilation, groups});
}

void bind_conv(py::module_& module) {
  module.def("boundary_conv_forward", &conv_forward, "slab"_a, "weight"_a, "out"_a, "slab_lo"_a,
             "out_lo"_a, "stride"_a, "padding"_a, "dilation"_a, "groups"_a,
             "out += what the inputs in `slab` contribute to a 3-D convolution.\n\n"
             "out[o] += sum_k weight[k] * in[o * stride - padding + k * dilation], over the inputs\n"
             "and outputs that lie in the given arrays.\n\n"
             "Args:\n"
             "    slab: inputs [N, Ci, *s]; element 0 has the global coordinates `slab_lo`.\n"
             "    weight: [Co, Ci / groups, *kernel].\n"
             "    out: [N, Co, *o]; element 0 has the global output coordinates `out_lo`.");
  module.def("boundary_conv_dgrad", &conv_dgrad, "grad_slab"_a, "weight"_a, "grad_in"_a,
             "slab_lo"_a, "in_lo"_a, "stride"_a, "padding"_a, "dilation"_a, "groups"_a,
             "grad_in += what a slab of the output's gradient contributes to the input's.\n\n"
             "The adjoint of boundary_conv_forward with respect to its inputs: `grad_slab`\n"
             "[N, Co, *s] begins at the output coordinates `slab_lo`, `grad_in` [N, Ci, *i] at the\n"
             "input coordinates `in_lo`.");
  module.def("boundary_conv_wgrad", &conv_wgrad, "slab"_a, "grad_out"_a, "grad_weight"_a,
             "slab_lo"_a, "out_lo"_a, "stride"_a, "padding"_a, "dilation"_a, "groups"_a,
             "grad_weight += what the inputs in `slab` contribute to the weight's gradient.\n\n"
             "The adjoint of boundary_conv_forward with respect to its weight, summed in a fixed\n"
             "order.");
}

void keyed_uniform(py::handle tensor, std::uint64_t key, const Coords& lo, const Coords& shape) {
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
  volume_of(shape);  // refuses shapes whose indices do not fit into the counter
  check_writable("out", view);
  require_cpu("out", view);
  const py::gil_scoped_release unlocked;
  cpu::keyed_uniform(view, key, lo, shape);
}

}  // namespace

void bind_kernels(py::module_& module) {
  bind_pack(module);
  bind_conv(module);
  module.def("keyed_uniform", &keyed_uniform, "out"_a, "key"_a, "lo"_a, "shape"_a,
             "out[i] = U[0, 1), a function of `key` and of the global index lo + i alone.\n\n"
             "Philox4x32-10 with the 64-bit `key`; its counter is the index of lo + i in C order of\n"
             "the global `shape`, so that the numbers do not depend on how an array is cut.");
  module.def("cpu_isa", [] { return cpu::isa().name; },
             "The instruction set that the CPU kernels use; PYDIST_ISA lowers it.");
  module.def("set_num_threads", &launch::set_num_threads, "threads"_a,
             "Threads that one kernel may use, in the whole process; results never depend on it.");
  module.def("get_num_threads", &launch::num_threads);
}

}  // namespace pydist::bindings
