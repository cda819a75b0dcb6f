// Copies boxes of tensors to and from buffers, for Python.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/coords_caster.hpp"
#include "bindings/on_device.hpp"
#include "bindings/tensor_border.hpp"
#include "ops/pack/kernels.hpp"
#include "ops/pack/regions.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;
using cpu::PackOp;
using cpu::PreparedTransfer;

// Memory traffic below which the interpreter lock is not released: another thread that takes it
// holds it for as long.
constexpr index_t kBytesUnderLock = 256 * 1024;

Coords permuted(const Coords& coords, const Coords& order) {
  Coords result(order.ndim());
  for (int dim = 0; dim < order.ndim(); ++dim) {
    result[dim] = coords[static_cast<int>(order[dim])];
  }
  return result;
}

void check_order(const Coords& order, int ndim) {
  std::vector<index_t> sorted(order.begin(), order.end()), all(static_cast<std::size_t>(ndim));
  std::ranges::sort(sorted);
  std::iota(all.begin(), all.end(), index_t{0});
  PYDIST_EXPECT(sorted == all, "order " + to_string(order) + " is no permutation of " +
                                   std::to_string(ndim) + " dims");
}

// The transfer of tensors that are not in host memory.
void transfer_on_cuda(PackOp op, const Borrowed& tensor, [[maybe_unused]] const TensorView& view,
                      [[maybe_unused]] const ops::Regions& regions,
                      [[maybe_unused]] const TensorView& buffer) {
  switch (op) {
    case PackOp::kPack:
      return on_device(tensor, [] {}, PYDIST_ON_CUDA(pack(view, regions, buffer, queue)));
    case PackOp::kUnpack:
      return on_device(tensor, [] {}, PYDIST_ON_CUDA(unpack(buffer, regions, view, queue)));
    case PackOp::kUnpackAdd:
      return on_device(tensor, [] {}, PYDIST_ON_CUDA(unpack_add(buffer, regions, view, queue)));
  }
}

// The class `Regions` of Python: boxes in the order of a buffer, and the plans of the last
// transfers. An exchange is repeated with tensors of the same layout, so the plans mostly fit.
class PlannedRegions {
 public:
  PlannedRegions(const std::vector<Box>& boxes, const std::optional<Coords>& order)
      : order_(order), regions_(in_order(boxes, order)) {}

  const ops::Regions& boxes() const { return regions_; }

  void transfer(PackOp op, const char* name, const Borrowed& tensor, const Borrowed& buffer) {
    TensorView view = tensor.view();
    if (order_ && order_->ndim() == view.ndim()) {
      view.shape = permuted(view.shape, *order_);
      view.strides = permuted(view.strides, *order_);
    }
    check_buffer(name, view, buffer.view());
    if (view.device.type != DeviceType::kCpu) {
      check_view(op, name, view);
      return transfer_on_cuda(op, tensor, view, regions_, buffer.view());
    }
    // Shared: another thread may replace it while this one works without the interpreter lock.
    std::shared_ptr<const PreparedTransfer>& last = last_[static_cast<std::size_t>(op)];
    std::shared_ptr<const PreparedTransfer> prepared = last;
    if (prepared == nullptr || !prepared->fits(view, buffer.view())) {
      check_view(op, name, view);
      prepared = std::make_shared<PreparedTransfer>(op, view, regions_, buffer.view());
      last = prepared;
    }
    std::optional<py::gil_scoped_release> unlocked;
    if (prepared->traffic() > kBytesUnderLock) unlocked.emplace();
    prepared->run(view, buffer.view());
  }

 private:
  static ops::Regions in_order(std::vector<Box> boxes, const std::optional<Coords>& order) {
    if (order) {
      for (Box& box : boxes) {
        check_order(*order, box.ndim());
        box = Box(permuted(box.lo(), *order), permuted(box.hi(), *order));
      }
    }
    return ops::Regions(boxes);
  }

  void check_buffer(const char* name, const TensorView& view, const TensorView& buffer) const {
    require_same_dtype("buffer", buffer, name, view);
    require_same_device("buffer", buffer, name, view);
    require_ndim("buffer", buffer, 1);
    require_contiguous("buffer", buffer);
    PYDIST_EXPECT(buffer.shape[0] >= regions_.elements(),
                  describe("buffer", buffer) + "; the regions have " +
                      std::to_string(regions_.elements()) + " elements");
  }

  void check_view(PackOp op, const char* name, const TensorView& view) const {
    regions_.require_inside(view.shape, name);
    if (op != PackOp::kPack) check_writable(name, view);
  }

  std::optional<Coords> order_;
  ops::Regions regions_;
  std::array<std::shared_ptr<const PreparedTransfer>, 3> last_;
};

void pack(py::handle src, PlannedRegions& regions, py::handle buffer) {
  regions.transfer(PackOp::kPack, "src", borrow(src, "src"),
                   borrow(buffer, "buffer", Access::kWrite));
}

void unpack(py::handle buffer, PlannedRegions& regions, py::handle dst) {
  regions.transfer(PackOp::kUnpack, "dst", borrow(dst, "dst", Access::kWrite),
                   borrow(buffer, "buffer"));
}

void unpack_add(py::handle buffer, PlannedRegions& regions, py::handle dst) {
  regions.transfer(PackOp::kUnpackAdd, "dst", borrow(dst, "dst", Access::kWrite),
                   borrow(buffer, "buffer"));
}

}  // namespace

void bind_pack(py::module_& module) {
  py::class_<PlannedRegions>(
      module, "Regions", py::is_final(),
      "Boxes in local indices of a view, one after the other in a buffer.\n\n"
      "Each box is contiguous in the buffer, in C order of its indices after the\n"
      "dims were put in `order`, whatever the strides of the view.")
      .def(py::init<const std::vector<Box>&, const std::optional<Coords>&>(), "boxes"_a,
           "order"_a = py::none())
      .def_property_readonly(
          "elements", [](const PlannedRegions& regions) { return regions.boxes().elements(); },
          "Elements of all boxes.")
      .def_property_readonly(
          "count", [](const PlannedRegions& regions) { return regions.boxes().count(); },
          "Number of boxes.");
  module.def("pack", &pack, "src"_a, "regions"_a, "buffer"_a,
             "buffer[:regions.elements] = the boxes of `src`, which may have any strides.");
  module.def("unpack", &unpack, "buffer"_a, "regions"_a, "dst"_a,
             "The boxes of `dst` = buffer. Where boxes overlap, the last one stays.");
  module.def("unpack_add", &unpack_add, "buffer"_a, "regions"_a, "dst"_a,
             "The boxes of `dst` += buffer, in the boxes' order where they overlap.\n\n"
             "fp16 and bf16 add in fp32, integers wrap, bool is a logical or.");
}

}  // namespace pydist::bindings
