// Converts Python objects to native views: the three ways in, and the checks that kernels share.
#include "bindings/tensor_border.hpp"

#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "bindings/bindings.hpp"

namespace pydist::bindings {
namespace {

bool table_enabled_by_environment() {
  const char* value = std::getenv("PYDIST_EXCHANGE_TABLE");
  return value == nullptr || std::string_view(value) != "0";
}

bool g_use_table = table_enabled_by_environment();

// The cached facts about a Python type. Types stay referenced, so that an address is never reused.
struct TypeEntry {
  py::object type;
  const dlpack::ExchangeTable* table;  // null: none, or of an unknown version
  bool is_tensor;                      // has the attributes of a torch tensor
};

// The function table that a type offers, if it has one of the major version known here. A library
// may chain older tables after a newer one.
const dlpack::ExchangeTable* find_table(py::handle type) {
  const py::object capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsuleName)) return nullptr;
  const auto* header = static_cast<const dlpack::ExchangeHeader*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  while (header != nullptr && header->version.major > dlpack::kMajorVersion) {
    header = header->previous;
  }
  if (header == nullptr || header->version.major != dlpack::kMajorVersion) return nullptr;
  const auto* table = reinterpret_cast<const dlpack::ExchangeTable*>(header);
  return table->tensor_from_object != nullptr ? table : nullptr;
}

// Returned by value: the cache may grow, and programs may make any number of types.
TypeEntry type_entry(py::handle type) {
  constexpr std::size_t kMaxCached = 64;
  // Never freed: Python has ended before static destructors run.
  static auto& cache = *new std::vector<TypeEntry>();
  for (const TypeEntry& entry : cache) {
    if (entry.type.is(type)) return entry;
  }
  const TypeEntry entry{py::reinterpret_borrow<py::object>(type), find_table(type),
                        py::hasattr(type, "data_ptr") && py::hasattr(type, "is_neg")};
  if (cache.size() < kMaxCached) cache.push_back(entry);
  return entry;
}

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

// Nothing for vector types, complex numbers, unsigned ones above 8 bits and quantized types.
std::optional<DType> from_dlpack(dlpack::DataType type) {
  if (type.lanes != 1) return std::nullopt;
  const auto key = [](int code, int bits) { return code * 256 + bits; };
  switch (key(type.code, type.bits)) {
    case key(dlpack::kBool, 8):
      return DType::kBool;
    case key(dlpack::kUInt, 8):
      return DType::kUInt8;
    case key(dlpack::kInt, 8):
      return DType::kInt8;
    case key(dlpack::kInt, 16):
      return DType::kInt16;
    case key(dlpack::kInt, 32):
      return DType::kInt32;
    case key(dlpack::kInt, 64):
      return DType::kInt64;
    case key(dlpack::kFloat, 16):
      return DType::kFloat16;
    case key(dlpack::kBfloat, 16):
      return DType::kBFloat16;
    case key(dlpack::kFloat, 32):
      return DType::kFloat32;
    case key(dlpack::kFloat, 64):
      return DType::kFloat64;
    default:
      return std::nullopt;
  }
}

constexpr std::array kDTypes = {DType::kBool,    DType::kUInt8,  DType::kInt8,    DType::kInt16,
                                DType::kInt32,   DType::kInt64,  DType::kFloat16, DType::kBFloat16,
                                DType::kFloat32, DType::kFloat64};

[[noreturn]] void refuse_dtype(const char* name, const std::string& given) {
  std::string known;
  for (const DType dtype : kDTypes) {
    known += (known.empty() ? "" : ", ") + std::string(name_of(dtype));
  }
  throw UsageError(std::string(name) + " has dtype " + given + "; possible are " + known);
}

void require_dims(const char* name, index_t ndim) {
  PYDIST_EXPECT(ndim <= kMaxDims, std::string(name) + " has " + std::to_string(ndim) +
                                      " dims, at most " + std::to_string(kMaxDims) +
                                      " are possible");
}

Coords contiguous_strides(const Coords& shape) {
  Coords strides(shape.ndim(), 1);
  for (int dim = shape.ndim() - 2; dim >= 0; --dim) {
    strides[dim] = checked_mul(strides[dim + 1], std::max<index_t>(shape[dim + 1], 1));
  }
  return strides;
}

// First way in. Shape and strides are copied: they belong to the tensor.
TensorView view_by_table(py::handle object, const char* name, const dlpack::ExchangeTable& table) {
  dlpack::Tensor tensor{};
  if (table.tensor_from_object(object.ptr(), &tensor) != 0) throw py::error_already_set();
  require_dims(name, tensor.ndim);
  TensorView view;
  view.shape = view.strides = Coords(tensor.ndim);
  for (int dim = 0; dim < tensor.ndim; ++dim) view.shape[dim] = tensor.shape[dim];
  if (tensor.strides == nullptr) {
    view.strides = contiguous_strides(view.shape);
  } else {
    for (int dim = 0; dim < tensor.ndim; ++dim) view.strides[dim] = tensor.strides[dim];
  }
  const std::optional<DType> dtype = from_dlpack(tensor.dtype);
  if (!dtype) {
    refuse_dtype(name, py::hasattr(object, "dtype") ? py::str(object.attr("dtype"))
                                                    : py::str("unknown to pydist"));
  }
  view.dtype = *dtype;
  if (tensor.data != nullptr) view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  switch (tensor.device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      break;
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      view.device = {DeviceType::kCuda, tensor.device.index};
      break;
    default:
      throw UsageError(std::string(name) + " is on " +
                       py::str(object.attr("device")).cast<std::string>() +
                       "; possible are cpu and cuda");
  }
  return view;
}

Device device_by_attributes(py::handle object, const char* name) {
  const py::object device = object.attr("device");
  const auto type = device.attr("type").cast<std::string>();
  if (type == "cpu") return {};
  PYDIST_EXPECT(type == "cuda", std::string(name) + " is on " +
                                    py::str(device).cast<std::string>() +
                                    "; possible are cpu and cuda");
  return {DeviceType::kCuda, device.attr("index").cast<int>()};
}

DType dtype_by_attributes(py::handle object, const char* name) {
  const auto given = py::str(object.attr("dtype")).cast<std::string>();
  for (const DType dtype : kDTypes) {
    if (given == "torch." + std::string(name_of(dtype))) return dtype;
  }
  refuse_dtype(name, given);
}

// Second way in: a Python call per fact. For tensors whose type has no table, as of a simulated
// device, and to compare both ways in tests (PYDIST_EXCHANGE_TABLE).
TensorView view_by_attributes(py::handle object, const char* name) {
  const auto shape = py::tuple(object.attr("shape"));
  require_dims(name, static_cast<index_t>(shape.size()));
  const auto strides = py::tuple(object.attr("stride")());
  TensorView view;
  view.shape = view.strides = Coords(static_cast<int>(shape.size()));
  for (int dim = 0; dim < view.ndim(); ++dim) {
    view.shape[dim] = shape[static_cast<std::size_t>(dim)].cast<index_t>();
    view.strides[dim] = strides[static_cast<std::size_t>(dim)].cast<index_t>();
  }
  view.dtype = dtype_by_attributes(object, name);
  view.device = device_by_attributes(object, name);
  const auto address = object.attr("data_ptr")().cast<std::uintptr_t>();
  view.data = reinterpret_cast<void*>(address);  // the only way to a pointer from Python
  return view;
}

// Type by the struct module's format character and the item's size; null format means bytes.
std::optional<DType> from_format(const char* format, Py_ssize_t size) {
  std::string_view code = format == nullptr ? "B" : format;
  const char native = std::endian::native == std::endian::little ? '<' : '>';
  if (!code.empty() && (code[0] == '@' || code[0] == '=' || code[0] == native)) {
    code.remove_prefix(1);
  }
  if (code.size() != 1) return std::nullopt;
  if (code == "?") return DType::kBool;
  if (code == "B" || code == "c") return DType::kUInt8;
  if (code == "e") return DType::kFloat16;
  if (code == "f") return DType::kFloat32;
  if (code == "d") return DType::kFloat64;
  if (std::string_view("bhilq").find(code[0]) == std::string_view::npos) return std::nullopt;
  switch (size) {
    case 1:
      return DType::kInt8;
    case 2:
      return DType::kInt16;
    case 4:
      return DType::kInt32;
    default:
      return DType::kInt64;
  }
}

// Third way in: NumPy arrays, bytes and other objects with the buffer protocol, in host memory.
TensorView view_of_buffer(const Py_buffer& buffer, const char* name) {
  require_dims(name, buffer.ndim);
  const std::optional<DType> dtype = from_format(buffer.format, buffer.itemsize);
  if (!dtype) refuse_dtype(name, "'" + std::string(buffer.format) + "' (buffer format)");
  TensorView view;
  view.data = buffer.buf;
  view.dtype = *dtype;
  view.shape = view.strides = Coords(buffer.ndim);
  for (int dim = 0; dim < buffer.ndim; ++dim) {
    view.shape[dim] = buffer.shape[dim];
    PYDIST_EXPECT(buffer.strides[dim] % buffer.itemsize == 0 || buffer.shape[dim] <= 1,
                  std::string(name) + " has a stride of " + std::to_string(buffer.strides[dim]) +
                      " bytes in dim " + std::to_string(dim) + ", not a multiple of its " +
                      std::to_string(buffer.itemsize) + "-byte elements");
    view.strides[dim] = buffer.strides[dim] / buffer.itemsize;
  }
  return view;
}

// Neither way in resolves the bit. (Lazy conjugates are complex and fall to their dtype.)
void refuse_lazy_negative(py::handle object, const char* name) {
  static PyObject* const method = PyUnicode_InternFromString("is_neg");
  const auto answer =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), method));
  if (!answer) throw py::error_already_set();
  PYDIST_EXPECT(!answer.is(py::bool_(true)),
                std::string(name) + " is a lazy negative view; call resolve_neg() first");
}

TensorView view_of_tensor(py::handle object, const char* name, const dlpack::ExchangeTable* table) {
  try {
    return table != nullptr ? view_by_table(object, name, *table)
                            : view_by_attributes(object, name);
  } catch (py::error_already_set& error) {
    // Sparse and mkldnn tensors, and those of torch.func, raise inside torch.
    const std::string message =
        std::string(name) + " (" + type_name(object) +
        ") has no memory that can be lent to native code, as is the case of sparse "
        "tensors and within torch.func, vmap and forward-mode AD";
    py::raise_from(error, error_type("UsageError").ptr(), message.c_str());
    throw py::error_already_set();
  }
}

}  // namespace

// Table, then attributes, then buffer. A view has the addresses of the object, which the caller
// keeps alive during the call; only a buffer is held, and released with the Borrowed. Whatever
// kernels assume of an argument (dims, dtype, device, strides) is checked after this, by name.
Borrowed borrow(py::handle object, const char* name, Access access) {
  const TypeEntry entry = type_entry(py::type::handle_of(object));
  Borrowed borrowed;
  if (entry.table != nullptr && (g_use_table || !entry.is_tensor)) borrowed.table_ = entry.table;
  if (borrowed.table_ != nullptr || entry.is_tensor) {
    if (entry.is_tensor) refuse_lazy_negative(object, name);
    borrowed.view_ = view_of_tensor(object, name, borrowed.table_);
  } else if (PyObject_CheckBuffer(object.ptr())) {
    const int flags =
        PyBUF_STRIDED_RO | PyBUF_FORMAT | (access == Access::kWrite ? PyBUF_WRITABLE : 0);
    Py_buffer buffer;
    if (PyObject_GetBuffer(object.ptr(), &buffer, flags) != 0) {
      py::error_already_set error;
      const std::string message =
          std::string(name) + " (" + type_name(object) + ") does not lend its memory for this use";
      py::raise_from(error, error_type("UsageError").ptr(), message.c_str());
      throw py::error_already_set();
    }
    borrowed.buffer_ = buffer;
    borrowed.view_ = view_of_buffer(buffer, name);
  } else {
    throw py::type_error(std::string(name) + " is a " + type_name(object) +
                         "; possible are torch tensors and objects with the buffer protocol");
  }
  PYDIST_EXPECT(borrowed->data != nullptr || borrowed->elements() == 0,
                std::string(name) + " (" + type_name(object) + ") of shape " +
                    to_string(borrowed->shape) +
                    " has no storage: fake, meta and wrapper tensors can't reach native code");
  return borrowed;
}

// The caller's current stream on the view's device, on which kernels are put: after the work that
// wrote the tensor, before the work that reads it. None for host memory.
void* Borrowed::stream() const {
  if (view_.device.type == DeviceType::kCpu) return nullptr;
  if (table_ != nullptr && table_->current_work_stream != nullptr) {
    void* stream = nullptr;
    if (table_->current_work_stream(dlpack::kCuda, view_.device.index, &stream) != 0) {
      throw py::error_already_set();
    }
    return stream;
  }
  const py::object stream =
      py::module_::import("torch").attr("cuda").attr("current_stream")(view_.device.index);
  return reinterpret_cast<void*>(stream.attr("cuda_stream").cast<std::uintptr_t>());
}

std::string describe(const char* name, const TensorView& view) {
  return std::string(name) + " is " + std::string(name_of(view.dtype)) + " " +
         to_string(view.shape) + " on " + to_string(view.device);
}

void require_cpu(const char* name, const TensorView& view) {
  PYDIST_EXPECT(view.device.type == DeviceType::kCpu,
                describe(name, view) + "; this call needs it on cpu");
}

void require_ndim(const char* name, const TensorView& view, int ndim) {
  PYDIST_EXPECT(view.ndim() == ndim,
                describe(name, view) + "; it needs " + std::to_string(ndim) + " dims");
}

void require_contiguous(const char* name, const TensorView& view) {
  PYDIST_EXPECT(view.contiguous(), describe(name, view) + " with strides " +
                                       to_string(view.strides) + "; it must be contiguous");
}

void require_same_dtype(const char* name, const TensorView& view, const char* other_name,
                        const TensorView& other) {
  PYDIST_EXPECT(
      view.dtype == other.dtype,
      describe(name, view) + ", " + describe(other_name, other) + "; both need the same dtype");
}

void require_same_device(const char* name, const TensorView& view, const char* other_name,
                         const TensorView& other) {
  PYDIST_EXPECT(
      view.device == other.device,
      describe(name, view) + ", " + describe(other_name, other) + "; both need the same device");
}

void bind_tensor_border(py::module_& module) {
  using namespace py::literals;
  module.def(
      "use_exchange_table", [](bool enabled) { return std::exchange(g_use_table, enabled); },
      "enabled"_a, "Turns DLPack's exchange table on or off for tensors; returns what it was.");
}

}  // namespace pydist::bindings
