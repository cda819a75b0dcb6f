// A "cuda" device for a torch that was built without CUDA: its memory is the host's, and what torch
// calls on it runs on the CPU, in the calling thread. See simulated_device.py.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "memory.hpp"

namespace simulated {
namespace {

using c10::Device;
using c10::DeviceIndex;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, current_stream);
  }
  c10::Stream getDefaultStream(Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, std::exchange(current_stream, stream.id()));
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  // torch's streams are the thread that calls: what is on them is over, or captured.
  inline static char reached, in_capture;
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    *event = is_captured(stream.id()) ? &in_capture : &reached;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == &in_capture) join_capture(stream.id());
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return is_captured(stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace
}  // namespace simulated

namespace at {

// torch looks for it under this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void deviceSynchronize(DeviceIndex) const override {}
  bool isPinnedPtr(const void* data) const override { return simulated::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &simulated::pinned_allocator(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Device getDeviceFromPtr(void*) const override { return simulated::kDevice; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

PYBIND11_MODULE(simulated_torch_device, m) {
  using namespace simulated;
  c10::SetAllocator(kDeviceType, &device_allocator());
  m.def("use_recorder", [](std::uintptr_t put, std::uintptr_t ends) {
    put_on_stream = reinterpret_cast<PutOnStream>(put);
    capture_ends = reinterpret_cast<bool (*)()>(ends);
  });
  m.def("current_stream", [] { return current_stream; });
  m.def("exchange_stream", [](std::int64_t id) { return std::exchange(current_stream, id); });
  m.def("record_stream", [](const at::Tensor& tensor, std::uintptr_t stream) {
    used_on(tensor.storage().mutable_data(), reinterpret_cast<void*>(stream));
  });
  m.def("resize_storage", [](const at::Tensor& tensor, std::size_t bytes) {
    const c10::Storage& storage = tensor.storage();
    c10::DataPtr data = device_allocator().allocate(bytes);
    const std::size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) std::memcpy(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  });
  m.def("allocated", [] { return usage().now; });
  m.def("peak", [] { return usage().peak; });
  m.def("reset_peak", [] { usage().peak = usage().now; });

  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph").def("replay", [](const Graph& graph) {
    const py::gil_scoped_release unlocked;
    const at::AutoDispatchBelowAutograd below;
    const c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset);
    for (const auto& call : graph.calls) call();
  });
  m.def("capturing", &capturing);
  m.def("join_capture", &join_capture);
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture);
  m.def("fail_capture", [] {
    if (capturing()) captured->failed = true;
  });
}
