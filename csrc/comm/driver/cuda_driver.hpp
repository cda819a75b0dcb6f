// Streams and events of CUDA, through the driver library opened at run time: they work with the
// streams of torch in a build without CUDA kernels too.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "comm/driver/dynamic_library.hpp"

namespace pydist::comm {

// A call of the CUDA driver failed. Python sees PydistError.
class DriverError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The entry points of libcuda that order work on streams. Handles are void*, statuses CUresult.
class CudaDriver {
 public:
  explicit CudaDriver(const std::string& path);

  void check(int status, const char* what) const;
  // Where further entry points are found.
  const DynamicLibrary& library() const { return library_; }

  static constexpr int kSuccess = 0, kNotReady = 600;

  int (*device_get)(int*, int);
  int (*primary_retain)(void**, int);
  int (*primary_release)(int);
  int (*context_push)(void*);
  int (*context_pop)(void**);
  int (*priority_range)(int*, int*);
  int (*stream_create)(void**, unsigned, int);
  int (*stream_wait)(void*, void*, unsigned);
  int (*stream_capturing)(void*, int*);
  int (*event_create)(void**, unsigned);
  int (*event_record)(void*, void*);
  int (*event_query)(void*);
  int (*event_destroy)(void*);

 private:
  int (*error_name_)(int, const char**);
  DynamicLibrary library_;
};

// The context of a device that torch works in, kept for as long as this lives.
class DeviceContext {
 public:
  DeviceContext(std::shared_ptr<const CudaDriver> driver, int device);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  // Makes it current on this thread, and puts back what was: autograd's threads have others.
  class Current {
   public:
    explicit Current(const DeviceContext& context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const CudaDriver& driver_;
  };

  const CudaDriver& driver() const { return *driver_; }
  void* handle() const { return context_; }
  int device() const { return device_; }  // a CUdevice

 private:
  std::shared_ptr<const CudaDriver> driver_;
  int device_ = 0;
  void* context_ = nullptr;
};

// A stream of the device's greatest priority: a few blocks that copy must not wait for the many
// that compute. It does not wait for the legacy default stream, nor that one for it.
//
// It outlives its owner, and serves the next one: torch's allocator records events on it when it
// frees memory that was used there, whenever that is.
class Stream {
 public:
  explicit Stream(std::shared_ptr<const DeviceContext> context);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void* handle() const { return stream_; }
  bool capturing() const;
  // Nobody shall have it after this owner: what is on it may never end. From any thread.
  void retire() { retired_ = true; }

 private:
  std::shared_ptr<const DeviceContext> context_;
  void* stream_ = nullptr;
  std::atomic<bool> retired_ = false;
};

// A place in a stream's order. The calls need the context to be current.
class Event {
 public:
  explicit Event(std::shared_ptr<const DeviceContext> context);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // What is on `stream` now comes before whatever is put on a stream that awaits this event.
  void record(void* stream);
  void delay(void* stream) const;
  bool reached() const;

 private:
  std::shared_ptr<const DeviceContext> context_;
  void* event_ = nullptr;
};

}  // namespace pydist::comm
