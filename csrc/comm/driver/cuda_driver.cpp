// Entry points of libcuda, and the owners of a context, a stream and an event.
#include "comm/driver/cuda_driver.hpp"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace pydist::comm {
namespace {

constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING

std::mutex resting;
// By context: the streams without an owner. Never destroyed, like the streams themselves.
std::map<void*, std::vector<void*>>& rested() {
  static auto& streams = *new std::map<void*, std::vector<void*>>;
  return streams;
}

}  // namespace

CudaDriver::CudaDriver(const std::string& path) : library_("the CUDA driver", "", {path}) {
  library_.find("cuGetErrorName", error_name_);
  library_.find("cuDeviceGet", device_get);
  library_.find("cuDevicePrimaryCtxRetain", primary_retain);
  library_.find("cuDevicePrimaryCtxRelease_v2", primary_release);
  library_.find("cuCtxPushCurrent_v2", context_push);
  library_.find("cuCtxPopCurrent_v2", context_pop);
  library_.find("cuCtxGetStreamPriorityRange", priority_range);
  library_.find("cuStreamCreateWithPriority", stream_create);
  library_.find("cuStreamWaitEvent", stream_wait);
  library_.find("cuStreamIsCapturing", stream_capturing);
  library_.find("cuEventCreate", event_create);
  library_.find("cuEventRecord", event_record);
  library_.find("cuEventQuery", event_query);
  library_.find("cuEventDestroy_v2", event_destroy);
}

void CudaDriver::check(int status, const char* what) const {
  if (status == kSuccess) return;
  const char* name = nullptr;
  const bool known = error_name_(status, &name) == kSuccess && name != nullptr;
  throw DriverError(std::string(what) +
                    " failed: " + (known ? name : "CUDA error " + std::to_string(status)));
}

DeviceContext::DeviceContext(std::shared_ptr<const CudaDriver> driver, int device)
    : driver_(std::move(driver)) {
  // torch has initialized the driver.
  driver_->check(driver_->device_get(&device_, device), "cuDeviceGet");
  driver_->check(driver_->primary_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

DeviceContext::~DeviceContext() { driver_->primary_release(device_); }

DeviceContext::Current::Current(const DeviceContext& context) : driver_(*context.driver_) {
  driver_.check(driver_.context_push(context.context_), "cuCtxPushCurrent");
}

DeviceContext::Current::~Current() {
  void* context = nullptr;
  driver_.context_pop(&context);
}

Stream::Stream(std::shared_ptr<const DeviceContext> context) : context_(std::move(context)) {
  {
    const std::lock_guard lock(resting);
    std::vector<void*>& streams = rested()[context_->handle()];
    if (!streams.empty()) {
      stream_ = streams.back();
      streams.pop_back();
      return;
    }
  }
  const DeviceContext::Current current(*context_);
  const CudaDriver& driver = context_->driver();
  int least = 0, greatest = 0;
  driver.check(driver.priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  driver.check(driver.stream_create(&stream_, kNonBlocking, greatest),
               "cuStreamCreateWithPriority");
}

Stream::~Stream() {
  int status = 0;
  const int asked = context_->driver().stream_capturing(stream_, &status);
  const bool usable = asked == CudaDriver::kSuccess && status == 0;  // in no capture
  if (retired_ || !usable) return;
  const std::lock_guard lock(resting);
  rested()[context_->handle()].push_back(stream_);
}

bool Stream::capturing() const {
  int status = 0;
  context_->driver().check(context_->driver().stream_capturing(stream_, &status),
                           "cuStreamIsCapturing");
  return status != 0;
}

Event::Event(std::shared_ptr<const DeviceContext> context) : context_(std::move(context)) {
  const DeviceContext::Current current(*context_);
  const CudaDriver& driver = context_->driver();
  driver.check(driver.event_create(&event_, kDisableTiming), "cuEventCreate");
}

Event::~Event() { context_->driver().event_destroy(event_); }

void Event::record(void* stream) {
  const CudaDriver& driver = context_->driver();
  driver.check(driver.event_record(event_, stream), "cuEventRecord");
}

void Event::delay(void* stream) const {
  const CudaDriver& driver = context_->driver();
  driver.check(driver.stream_wait(stream, event_, 0), "cuStreamWaitEvent");
}

bool Event::reached() const {
  const CudaDriver& driver = context_->driver();
  const int status = driver.event_query(event_);
  if (status != CudaDriver::kNotReady) driver.check(status, "cuEventQuery");
  return status == CudaDriver::kSuccess;
}

}  // namespace pydist::comm
