// A recorder: a shared library with the symbols of the CUDA driver and (nccl_recorder.cpp) of NCCL.
// It tests neither of them. It executes pydist's operations on streams, on host memory, and records
// the calls, which tests their order, their matching between ranks and their errors without a
// device.
//
// A stream is a thread with a queue; stream 0 is the calling thread itself, so computations of a
// test on tensors in host memory are "on the caller's stream". Device memory is memory that other
// processes can map (driver_recorder_memory.hpp); with it, ranks are threads or processes.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "driver_recorder_memory.hpp"
#include "nccl_recorder_streams.hpp"

using namespace recorder;

namespace {

using EventHandle = std::shared_ptr<Event>*;
using Address = std::uint64_t;

std::atomic<int> capturing = 0;     // the reported status of every stream
std::atomic<int> failing_copy = 0;  // the status of the next copy, if not 0
std::atomic<int> failing_map = 0;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Statuses of a capture.
constexpr int kCaptured = 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: the host would wait
constexpr int kIsolated = 905;  // CUDA_ERROR_STREAM_CAPTURE_ISOLATION: a wait for outside work
constexpr int kOfGraph = 907;   // CUDA_ERROR_CAPTURED_EVENT

std::mutex joining;
std::set<Stream*> in_capture;  // besides the thread that captures

bool is_captured(const Stream* stream) {
  return stream == nullptr ? thread_is_captured() : stream->captured.load();
}

void record_now(const std::shared_ptr<Event>& event, Stream* stream) {
  long count = 0;
  {
    const std::lock_guard lock(event->mutex);
    count = ++event->recorded;
  }
  if (stream == nullptr) {
    event->complete(count);
  } else {
    stream->put([event, count] { event->complete(count); });
  }
}

void wait_now(const std::shared_ptr<Event>& event, Stream* stream) {
  long count = 0;
  {
    const std::lock_guard lock(event->mutex);
    count = event->recorded;
  }
  if (stream == nullptr) {
    event->await(count);
  } else {
    stream->put([event, count] { event->await(count); });
  }
}

}  // namespace

// -- for tests --------------------------------------------------------------------------------

EXPORT const char* recorder_notes() {
  static thread_local std::string copy;
  const std::lock_guard lock(noting);
  copy = std::exchange(notes, "");
  return copy.c_str();
}
EXPORT void recorder_delay(long microseconds) { delay_us = microseconds; }
EXPORT void recorder_capture(int status) { capturing = status; }
EXPORT void recorder_fail_next_copy(int status) { failing_copy = status; }
EXPORT void recorder_fail_next_map(int status) { failing_map = status; }
EXPORT void recorder_put(void* stream, void (*function)(void*), void* argument) {
  static_cast<Stream*>(stream)->put([=] { function(argument); });
}
// Ends a capture; returns whether all participating streams were waited for.
EXPORT bool recorder_capture_ends() {
  const std::lock_guard lock(joining);
  bool joined = true;
  for (Stream* stream : in_capture) {
    joined &= stream->joined_operations == stream->captured_operations;
    stream->captured = false;
    stream->captured_operations = stream->joined_operations = 0;
  }
  in_capture.clear();
  return joined;
}
EXPORT int recorder_blocks() { return memory().blocks(); }

// -- streams and events -------------------------------------------------------------------------

EXPORT int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_RECORDED";
  return 0;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  return *device = ordinal, ordinal == 0 ? 0 : 101;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int) {
  static char place;  // specific to this copy of the recorder, unlike symbols of headers
  return *context = &place, 0;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
EXPORT int cuCtxPushCurrent_v2(void*) { return 0; }
EXPORT int cuCtxPopCurrent_v2(void**) { return 0; }
EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, 0;
}
EXPORT int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  static std::atomic<int> count = 0;
  auto* made = new Stream(count++);
  note("create " + name_of(made) + " flags " + std::to_string(flags) + " priority " +
       std::to_string(priority));
  return *stream = made, 0;
}
EXPORT int cuStreamIsCapturing(void* stream, int* status) {
  return *status = capturing || is_captured(static_cast<Stream*>(stream)), 0;
}
EXPORT int cuEventCreate(void** event, unsigned) {
  static std::atomic<int> count = 0;
  auto made = std::make_shared<Event>();
  made->number = count++;
  return *event = new std::shared_ptr<Event>(made), 0;
}
EXPORT int cuEventDestroy_v2(void* event) { return delete static_cast<EventHandle>(event), 0; }
EXPORT int cuEventRecord(void* handle, void* where) {
  const std::shared_ptr<Event> event = *static_cast<EventHandle>(handle);
  auto* stream = static_cast<Stream*>(where);
  note("record " + name_of(stream));
  event->captured = is_captured(stream);
  if (!event->captured) return record_now(event, stream), 0;
  event->stream = stream;
  event->operations = stream == nullptr ? 0 : stream->captured_operations;
  simulated_capture([event, stream] { record_now(event, stream); });
  return 0;
}
EXPORT int cuStreamWaitEvent(void* where, void* handle, unsigned) {
  const std::shared_ptr<Event> event = *static_cast<EventHandle>(handle);
  auto* stream = static_cast<Stream*>(where);
  note("wait " + name_of(stream));
  if (!event->captured) {
    if (is_captured(stream) && event->recorded > 0) return kIsolated;
    return wait_now(event, stream), 0;
  }
  if (stream == nullptr) {
    if (event->stream != nullptr) event->stream->joined_operations = event->operations;
  } else {
    const std::lock_guard lock(joining);
    in_capture.insert(stream);
    stream->captured = true;
    ++stream->captured_operations;
  }
  simulated_capture([event, stream] { wait_now(event, stream); });
  return 0;
}
EXPORT int cuEventQuery(void* handle) {
  Event& event = **static_cast<EventHandle>(handle);
  if (event.captured) return kOfGraph;
  const std::lock_guard lock(event.mutex);
  return event.completed >= event.recorded ? 0 : 600;
}
EXPORT int cuStreamSynchronize(void* where) {
  if (is_captured(static_cast<Stream*>(where))) return kCaptured;
  std::promise<void> reached;
  static_cast<Stream*>(where)->put([&reached] { reached.set_value(); });
  reached.get_future().wait();
  return 0;
}

// -- memory -------------------------------------------------------------------------------------

EXPORT int cuDeviceGetAttribute(int* value, int, int) { return *value = 1, 0; }
EXPORT int cuMemAlloc_v2(Address* block, std::size_t bytes) {
  *block = reinterpret_cast<Address>(memory().allocate(bytes));
  return *block == 0 ? 2 : 0;
}
EXPORT int cuMemFree_v2(Address block) { return memory().release(at<std::byte>(block)) ? 0 : 1; }
EXPORT int cuIpcGetMemHandle(Handle* handle, Address block) {
  return memory().name(at<std::byte>(block), *handle) ? 0 : 1;
}
EXPORT int cuIpcOpenMemHandle_v2(Address* block, Handle handle, unsigned flags) {
  if (const int status = failing_map.exchange(0)) return status;
  *block = flags == 1 ? reinterpret_cast<Address>(memory().map(handle)) : 0;
  return *block == 0 ? 205 : 0;
}
EXPORT int cuIpcCloseMemHandle(Address block) {
  return memory().unmap(at<std::byte>(block)) ? 0 : 1;
}
EXPORT int cuMemsetD32Async(Address to, unsigned value, std::size_t words, void* where) {
  static_cast<Stream*>(where)->put([=] {
    for (std::size_t i = 0; i < words; ++i) at<unsigned>(to)[i] = value;
  });
  return 0;
}
EXPORT int cuMemcpyAsync(Address to, Address from, std::size_t bytes, void* where) {
  if (const int status = failing_copy.exchange(0)) return status;
  auto* stream = static_cast<Stream*>(where);
  note("copy " + std::to_string(bytes) + " on " + name_of(stream));
  stream->put([=] { std::memcpy(at<std::byte>(to), at<std::byte>(from), bytes); });
  return 0;
}
EXPORT int cuStreamWriteValue32_v2(void* where, Address flag, std::uint32_t value, unsigned) {
  auto* stream = static_cast<Stream*>(where);
  const bool own = memory().owns(at<std::byte>(flag));
  note(std::string(own ? "set own " : "set ") + std::to_string(value) + " on " + name_of(stream));
  stream->put(
      [=] { std::atomic_ref(*at<std::uint32_t>(flag)).store(value, std::memory_order_release); });
  return 0;
}
EXPORT int cuStreamWaitValue32_v2(void* where, Address flag, std::uint32_t value, unsigned how) {
  if ((how & 1) == 0) return 1;  // pydist only waits for equality
  auto* stream = static_cast<Stream*>(where);
  const bool own = memory().owns(at<std::byte>(flag));
  note(std::string(own ? "await own " : "mismatch: await ") + std::to_string(value) + " on " +
       name_of(stream));
  stream->put([=] {
    const std::atomic_ref word(*at<std::uint32_t>(flag));
    while (word.load(std::memory_order_acquire) != value) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  return 0;
}
