// The operators of the simulated device: nearly all run on the host; those that make tensors, or
// change what they lie in, are its own.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <utility>

#include "calls.hpp"
#include "memory.hpp"

namespace simulated {
namespace {

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!device || device->index() <= 0, "CUDA error: invalid device ordinal");
  TORCH_CHECK(!layout || *layout == at::kStrided, "only strided tensors are simulated");
  TORCH_CHECK(!pin || !*pin, "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  TORCH_CHECK(!device || device->index() <= 0, "CUDA error: invalid device ordinal");
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

// A tensor of zeros without memory, which torch's own fallback for such tensors takes care of.
at::Tensor zeros_without_memory(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<c10::Device>,
                                std::optional<bool>) {
  struct NoMemory final : c10::Allocator {
    c10::DataPtr allocate(std::size_t) override { return {nullptr, kDevice}; }
    void copy_data(void*, const void*, std::size_t) const override {}
  };
  static auto& none = *new NoMemory;
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &none,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA) |
                                       c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()),
                                   std::nullopt);
}

at::Tensor& set(at::Tensor& self, c10::Storage storage, c10::SymInt offset,
                c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  } else {
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage) {
  const c10::SymInt count(static_cast<std::int64_t>(storage.nbytes() / self.dtype().itemsize()));
  return set(self, std::move(storage), c10::SymInt(0), c10::SymIntArrayRef(&count, 1),
             c10::SymIntArrayRef());
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  return set(self, other.storage(), other.storage_offset(), other.sym_sizes(), other.sym_strides());
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_efficientzerotensor", TORCH_FN(zeros_without_memory));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  // These would otherwise choose a kernel by the device themselves.
  for (const char* name : {"copy_", "convolution", "_convolution", "convolution_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

}  // namespace
}  // namespace simulated
