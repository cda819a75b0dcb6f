// Checksums of tensors and buffers for Python.
#include "bindings/bindings.hpp"
#include "bindings/tensor_border.hpp"
#include "io/crc32c.hpp"

namespace pydist::bindings {

void bind_io(py::module_& module) {
  using namespace py::literals;
  module.def(
      "crc32c",
      [](py::handle data, std::uint32_t crc) {
        const Borrowed borrowed = borrow(data, "data");
        require_cpu("data", borrowed.view());
        require_contiguous("data", borrowed.view());
        const void* bytes = borrowed->data;
        const auto size = static_cast<std::size_t>(borrowed->bytes());
        const py::gil_scoped_release release;
        return io::crc32c(bytes, size, crc);
      },
      "data"_a, "crc"_a = 0,
      "CRC-32C of a contiguous CPU tensor or buffer; `crc` continues an earlier one.");
}

}  // namespace pydist::bindings
