#include "calls.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "memory.hpp"

namespace simulated {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// Puts f(tensor) into the place of every tensor of a value.
template <class F>
void replace_tensors(IValue& value, const F& f) {
  if (value.isTensor()) {
    value = f(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(f(each));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) {
      list.push_back(each ? std::optional(f(*each)) : std::nullopt);
    }
    value = list;
  }
}

std::vector<Tensor> tensors_of(Stack values) {
  std::vector<Tensor> found;
  for (IValue& value : values) {
    replace_tensors(value, [&](const Tensor& each) { return found.emplace_back(each); });
  }
  return found;
}

void lie_as(const Tensor& tensor, const Tensor& other) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(other.storage_offset());
  impl->set_sizes_and_strides(other.sizes(), other.strides());
}

// A tensor of the host in the memory of one of the device, which it keeps if it is to own it.
Tensor on_host(const Tensor& device, bool owns) {
  const c10::Storage storage = device.storage();
  c10::DataPtr data(storage.mutable_data(), c10::Device(c10::kCPU));
  if (owns) {
    data = c10::DataPtr(
        storage.mutable_data(), new c10::Storage(storage),
        [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::Device(c10::kCPU));
  }
  c10::Storage alias(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data),
      c10::GetCPUAllocator(), /*resizable=*/true));
  Tensor host = at::detail::make_tensor<at::TensorImpl>(
      std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), device.dtype());
  lie_as(host, device);
  auto* impl = host.unsafeGetTensorImpl();
  impl->_set_neg(device.is_neg());
  impl->_set_conj(device.is_conj());
  if (device.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return host;
}

// The tensors of a call: those given, and those made.
class Aliases {
 public:
  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      takes_host_ |= tensor.defined() && tensor.is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    for (const Pair& each : pairs_) {
      if (each.device.is_same(tensor)) return each.host;
    }
    pairs_.push_back({tensor, on_host(tensor, true), tensor.storage().mutable_data()});
    return pairs_.back().host;
  }

  bool mixes_devices() const { return takes_host_ && !pairs_.empty(); }

  // Of the device, null for a tensor that was the host's all along.
  const Tensor* device_of(const Tensor& host) const {
    for (const Pair& each : pairs_) {
      if (each.host.is_same(host)) return &each.device;
    }
    return nullptr;
  }

  // Gives the tensors of the device what a call has given those of the host: memory, shape.
  void follow() const {
    for (const auto& [device, host, data] : pairs_) {
      const std::size_t bytes = host.storage().nbytes();
      if (host.storage().mutable_data() != data || bytes != device.storage().nbytes()) {
        device.storage().set_data_ptr_noswap(copied(host));
        device.storage().set_nbytes(bytes);
      }
      if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
          host.storage_offset() != device.storage_offset()) {
        lie_as(device, host);
      }
    }
  }

  Tensor to_device(const Tensor& host) {
    if (!host.defined() || !host.is_cpu()) return host;
    if (const Tensor* given = device_of(host)) return *given;
    Tensor device = at::detail::make_tensor<at::TensorImpl>(
        storage_of(host), c10::DispatchKeySet(c10::DispatchKey::CUDA), host.dtype());
    lie_as(device, host);
    device.unsafeGetTensorImpl()->_set_neg(host.is_neg());
    device.unsafeGetTensorImpl()->_set_conj(host.is_conj());
    return device;
  }

  void remember_all() const {
    for (const Pair& each : pairs_) remember(each.data);
  }

 private:
  struct Pair {
    Tensor device, host;
    void* data;
  };

  static c10::DataPtr copied(const Tensor& host) {
    const std::size_t bytes = host.storage().nbytes();
    c10::DataPtr data = device_allocator().allocate(bytes);
    if (bytes > 0) std::memcpy(data.get(), host.storage().data(), bytes);
    return data;
  }

  c10::Storage storage_of(const Tensor& host) {
    const c10::StorageImpl* const own = host.storage().unsafeGetStorageImpl();
    for (const Pair& each : pairs_) {
      if (each.host.storage().unsafeGetStorageImpl() == own) return each.device.storage();
    }
    for (const auto& [known, storage] : made_) {
      if (known == own) return storage;
    }
    c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), host.storage().nbytes(), copied(host),
        &device_allocator(), /*resizable=*/true));
    made_.emplace_back(own, storage);
    return storage;
  }

  std::vector<Pair> pairs_;
  std::vector<std::pair<const c10::StorageImpl*, c10::Storage>> made_;
  bool takes_host_ = false;
};

// Calls that take tensors of both; others take single numbers of the host alone.
bool may_mix(const std::string& name) {
  static const std::set<std::string> names{
      "aten::copy_",      "aten::_copy_from", "aten::index",
      "aten::index_put_", "aten::index_put",  "aten::_index_put_impl_",
  };
  return names.contains(name);
}

bool is_copy(const std::string& name) {
  return name == "aten::copy_" || name == "aten::_copy_from";
}

// Whether the host waits for the device in a call, which no graph can hold.
bool waits(const std::string& name, const Stack& inputs, const Aliases& aliases) {
  static const std::set<std::string> names{
      "aten::_local_scalar_dense", "aten::nonzero",  "aten::equal",
      "aten::masked_select",       "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive",  "aten::bincount",
  };
  if (!is_copy(name)) return names.contains(name);
  const auto pageable = [&](const IValue& value) {
    return aliases.device_of(value.toTensor()) == nullptr &&
           !is_pinned(value.toTensor().storage().data());
  };
  return pageable(inputs[0]) || pageable(inputs[1]);
}

// What a graph calls with: the memory that the tensors have now, whoever owns that.
Stack without_ownership(Stack inputs, const Aliases& aliases) {
  for (IValue& value : inputs) {
    replace_tensors(value, [&](const Tensor& each) {
      const Tensor* const device = aliases.device_of(each);
      return device == nullptr ? each : on_host(*device, false);
    });
  }
  return inputs;
}

// Puts the call into the graph.
void capture(const c10::OperatorHandle& op, Stack inputs, const Stack& results) {
  std::vector<Tensor> targets;
  for (const Tensor& each : tensors_of(results)) {
    targets.push_back(each.defined() && each.is_cuda() ? on_host(each, false) : Tensor());
  }
  captured->calls.push_back([op, inputs = std::move(inputs), targets = std::move(targets)] {
    Stack stack = inputs;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    const std::vector<Tensor> found = tensors_of(std::move(stack));
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (!targets[i].defined() || targets[i].numel() == 0) continue;
      if (targets[i].data_ptr() != found[i].data_ptr()) targets[i].copy_(found[i]);
    }
  });
}

}  // namespace

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const std::string& name = op.operator_name().name;
  Stack inputs = torch::jit::pop(*stack, op.schema().arguments().size());
  Aliases aliases;
  for (IValue& value : inputs) {
    replace_tensors(value, [&](const Tensor& each) { return aliases.to_host(each); });
    if (value.isDevice() && value.toDevice().type() == kDeviceType) {
      value = IValue(c10::Device(c10::kCPU));
    }
  }
  TORCH_CHECK(!aliases.mixes_devices() || may_mix(name),
              "Expected all tensors to be on the same device, but found at least two devices, "
              "cuda:0 and cpu! (when calling ",
              name, ")");
  const bool records = capturing();
  if (records && waits(name, inputs, aliases)) {
    captured->failed = true;
    TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (", name, ")");
  }
  Stack again;
  if (records) {
    aliases.remember_all();
    again = without_ownership(inputs, aliases);
  }
  Stack results = std::move(inputs);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
  aliases.follow();
  for (IValue& value : results) {
    replace_tensors(value, [&](const Tensor& each) {
      // What is copied to the host stays there.
      return is_copy(name) && aliases.device_of(each) == nullptr ? each : aliases.to_device(each);
    });
  }
  if (records) capture(op, std::move(again), results);
  for (IValue& value : results) stack->push_back(std::move(value));
}

}  // namespace simulated
