// The one border at which Python tensors become native views.
//
// Three ways in, tried in this order:
//   1. DLPack's exchange table of the object's type (torch >= 2.10): no Python call, current stream
//      included;
//   2. the attributes of a torch tensor (data_ptr, shape, stride, dtype, device): where the type
//      has no table, or PYDIST_EXCHANGE_TABLE=0 or use_exchange_table(False) turns it off;
//   3. the buffer protocol: NumPy arrays, memoryview, bytes.
// Kernels' bindings (csrc/ops/*/bind*.cpp) accept tensors only through here; then they check
// shapes, strides and dtypes with names and values, and kernels check nothing.
//
// All ways refuse tensors without plain memory: fake and wrapper tensors, lazy negative and
// conjugate views, sparse and mkldnn layouts, unknown dtypes and devices.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <utility>

#include "bindings/dlpack_abi.hpp"
#include "core/view.hpp"

namespace pydist::bindings {

namespace py = pybind11;

enum class Access { kRead, kWrite };

// A view and the references that keep it valid, for the duration of one call; made and destroyed
// with the GIL held (the view itself may be used without).
class Borrowed {
 public:
  const TensorView& view() const { return view_; }
  const TensorView* operator->() const { return &view_; }

  // The current CUDA stream of the caller's framework, as a cudaStream_t.
  // Call with the GIL held. Null (the default stream) for CPU tensors.
  void* stream() const;

  Borrowed(Borrowed&& other) noexcept
      : view_(other.view_), table_(other.table_), buffer_(std::exchange(other.buffer_, {})) {}
  Borrowed& operator=(Borrowed&&) = delete;
  ~Borrowed() {
    if (buffer_) PyBuffer_Release(&*buffer_);
  }

 private:
  friend Borrowed borrow(py::handle object, const char* name, Access access);
  Borrowed() = default;

  TensorView view_;
  const dlpack::ExchangeTable* table_ = nullptr;
  std::optional<Py_buffer> buffer_;
};

// Borrows `object` for the current call. `name` is the argument's name, for messages.
// Raises ValueError if the tensor can't be borrowed, TypeError if the object is not a tensor.
Borrowed borrow(py::handle object, const char* name, Access access = Access::kRead);

// "src is float32 (4, 8) on cpu", for messages.
std::string describe(const char* name, const TensorView& view);

// Checks that kernels share; each raises ValueError with names and values.
void require_cpu(const char* name, const TensorView& view);
void require_ndim(const char* name, const TensorView& view, int ndim);
void require_contiguous(const char* name, const TensorView& view);
void require_same_dtype(const char* name, const TensorView& view, const char* other_name,
                        const TensorView& other);
void require_same_device(const char* name, const TensorView& view, const char* other_name,
                         const TensorView& other);

// use_exchange_table(enabled) -> bool, for tests of the second way in.
void bind_tensor_border(py::module_& module);

}  // namespace pydist::bindings
