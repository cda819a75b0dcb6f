// Conversion of stored values to a network's input, for Python.
#include <string>

#include "bindings/bindings.hpp"
#include "bindings/on_device.hpp"
#include "bindings/tensor_border.hpp"
#include "ops/input/body.hpp"
#include "ops/input/kernels.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;

// Checks of both kernels: the block, its input, and the flag for values that are not finite.
void check_block(const TensorView& stored, const TensorView& out, const TensorView& found) {
  require_ndim("stored", stored, ops::kBlockDims);
  require_ndim("out", out, ops::kBlockDims);
  PYDIST_EXPECT(stored.shape == out.shape,
                describe("stored", stored) + " and " + describe("out", out) + " differ in shape");
  PYDIST_EXPECT(out.dtype == DType::kFloat32 || out.dtype == DType::kFloat64,
                describe("out", out) + "; possible are float32 and float64");
  PYDIST_EXPECT(found.dtype == DType::kInt32 && found.elements() == 1,
                describe("found", found) + ": one int32 is needed");
  require_same_device("out", out, "stored", stored);
  require_same_device("found", found, "stored", stored);
  check_writable("out", out);
}

void look_up(py::handle stored_array, py::handle table_array, double divisor, py::handle out_array,
             py::handle found_array) {
  const Borrowed stored = borrow(stored_array, "stored"), table = borrow(table_array, "table");
  const Borrowed out = borrow(out_array, "out", Access::kWrite);
  const Borrowed found = borrow(found_array, "found", Access::kWrite);
  check_block(stored.view(), out.view(), found.view());
  const int size = size_of(stored->dtype);
  PYDIST_EXPECT(!is_floating(stored->dtype) && size <= 2,
                describe("stored", stored.view()) + "; possible are 8 and 16 bit integers");
  require_ndim("table", table.view(), 2);
  require_contiguous("table", table.view());
  require_same_dtype("table", table.view(), "out", out.view());
  require_same_device("table", table.view(), "out", out.view());
  PYDIST_EXPECT(table->shape[0] == stored->shape[0] && table->shape[1] == index_t{1} << (8 * size),
                describe("table", table.view()) + " for " + describe("stored", stored.view()) +
                    ": one entry for each channel and value is needed");
  on_device(
      out, [&] { cpu::look_up(stored.view(), table.view(), divisor, out.view(), found.view()); },
      PYDIST_ON_CUDA(
          look_up(stored.view(), table.view(), divisor, out.view(), found.view(), queue)));
}

void rescale(py::handle stored_array, py::handle maps_array, bool log, double divisor,
             py::handle out_array, py::handle found_array) {
  const Borrowed stored = borrow(stored_array, "stored"), maps = borrow(maps_array, "maps");
  const Borrowed out = borrow(out_array, "out", Access::kWrite);
  const Borrowed found = borrow(found_array, "found", Access::kWrite);
  check_block(stored.view(), out.view(), found.view());
  require_ndim("maps", maps.view(), 2);
  require_contiguous("maps", maps.view());
  require_same_device("maps", maps.view(), "out", out.view());
  PYDIST_EXPECT(
      maps->dtype == DType::kFloat64 && maps->shape[0] == stored->shape[0] && maps->shape[1] == 4,
      describe("maps", maps.view()) + ": float64 (channels, 4) is needed");
  on_device(
      out,
      [&] { cpu::rescale(stored.view(), maps.view(), log, divisor, out.view(), found.view()); },
      PYDIST_ON_CUDA(
          rescale(stored.view(), maps.view(), log, divisor, out.view(), found.view(), queue)));
}

}  // namespace

void bind_input(py::module_& module) {
  module.def("look_up", &look_up, "stored"_a, "table"_a, "divisor"_a, "out"_a, "found"_a,
             "out[c, i] = table[c, bits of stored[c, i]] / divisor, in one pass.\n\n"
             "Args:\n"
             "    stored: 8 or 16 bit integers [C, D, H, W], any strides.\n"
             "    table: [C, 256 or 65536], of the type of `out`: by the bits of a value.\n"
             "    divisor: rounded to the type of `out`.\n"
             "    out: float32 or float64, of the shape of `stored`, any strides.\n"
             "    found: one int32, set to 1 if a result is not finite, else left alone.");
  module.def("rescale", &rescale, "stored"_a, "maps"_a, "log"_a, "divisor"_a, "out"_a, "found"_a,
             "out[c, i] = (L(clip(stored[c, i], lower, upper)) - shift) / scale / divisor.\n\n"
             "Args:\n"
             "    stored: [C, D, H, W], any dtype and strides.\n"
             "    maps: float64 [C, 4]: lower, upper, shift and scale by channel.\n"
             "    log: whether L is log1p, else the identity.\n"
             "    divisor, out, found: as look_up.");
}

}  // namespace pydist::bindings
