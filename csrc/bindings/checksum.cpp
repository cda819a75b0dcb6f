// Checksums of tensors and buffers for Python.
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "bindings/bindings.hpp"
#include "bindings/tensor_border.hpp"
#include "io/crc32c.hpp"

namespace pydist::bindings {

void bind_io(py::module_& module) {
  using namespace py::literals;
  module.def(
      "crc32c",
      [](py::handle data, std::uint32_t crc, std::int64_t start, std::optional<std::int64_t> stop) {
        const Borrowed borrowed = borrow(data, "data");
        require_cpu("data", borrowed.view());
        require_contiguous("data", borrowed.view());
        const std::int64_t size = borrowed->bytes();
        const std::int64_t end = stop.value_or(size);
        if (start < 0 || start > end || end > size) {
          throw py::value_error("bytes " + std::to_string(start) + " to " + std::to_string(end) +
                                " of data of " + std::to_string(size) + " bytes");
        }
        const auto* bytes = static_cast<const std::byte*>(borrowed->data);
        const py::gil_scoped_release release;
        return io::crc32c(bytes + start, static_cast<std::size_t>(end - start), crc);
      },
      "data"_a, "crc"_a = 0, "start"_a = 0, "stop"_a = py::none(),
      "CRC-32C of a contiguous CPU tensor or buffer, or of its bytes from `start` to `stop`; `crc` "
      "continues an earlier one.");
}

}  // namespace pydist::bindings
