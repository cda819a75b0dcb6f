// Checksums of tensors and buffers, and reads of boxes from files, for Python.
#include <pybind11/stl.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/tensor_border.hpp"
#include "io/box_read.hpp"
#include "io/crc32c.hpp"

namespace pydist::bindings {
namespace {

using Extents = std::vector<std::int64_t>;

void read_box(int descriptor, std::uint64_t offset, std::uint64_t item, const Extents& shape,
              const Extents& lo, const Extents& hi, py::handle buffer) {
  const Borrowed borrowed = borrow(buffer, "buffer", Access::kWrite);
  require_cpu("buffer", borrowed.view());
  require_contiguous("buffer", borrowed.view());
  const std::span<std::byte> out(static_cast<std::byte*>(borrowed->data),
                                 static_cast<std::size_t>(borrowed->bytes()));
  std::error_code failed;
  try {
    const py::gil_scoped_release release;
    io::read_box({descriptor, offset, item, shape}, lo, hi, out);
    return;
  } catch (const std::system_error& error) {
    failed = error.code();
  }
  const std::string text =
      failed ? failed.message() : std::string("the file ends within the array");
  const py::object error =
      py::reinterpret_borrow<py::object>(PyExc_OSError)(failed ? failed.value() : EIO, text);
  PyErr_SetObject(PyExc_OSError, error.ptr());
  throw py::error_already_set();
}

}  // namespace

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
  module.def("read_box", &read_box, "descriptor"_a, "offset"_a, "item"_a, "shape"_a, "lo"_a, "hi"_a,
             "buffer"_a,
             "Reads a box of a row-major array of an open file, which begins at a byte, into a "
             "contiguous buffer; see csrc/io/box_read.hpp. Raises OSError, ValueError.");
}

}  // namespace pydist::bindings
