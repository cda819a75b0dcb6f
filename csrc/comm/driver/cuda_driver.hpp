// Streams and events of CUDA, through the driver library opened at run time: they also work with
// torch's streams in a build without CUDA kernels.
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
// Declared here, as no header of CUDA is needed to build; cuda_driver.cpp has the symbol of each,
// some with a version (_v2), which fixes its ABI.
class CudaDriver {
 public:
  // Opens the library, such as "libcuda.so.1"; LibraryMissing if it or a symbol is not there.
  explicit CudaDriver(const std::string& path);

  // Throws DriverError, with `what` and CUDA's name of the status, unless it is kSuccess.
  void check(int status, const char* what) const;
  // The library, for further entry points.
  const DynamicLibrary& library() const { return library_; }

  static constexpr int kSuccess = 0, kNotReady = 600;  // CUDA_SUCCESS, CUDA_ERROR_NOT_READY

  // The parameters are the driver's, in its order.
  int (*device_get)(int*, int);
  int (*primary_retain)(void**, int);
  int (*primary_release)(int);
  int (*context_push)(void*);
  int (*context_pop)(void**);
  int (*priority_range)(int*, int*);            // least and greatest; lower numbers are higher
  int (*stream_create)(void**, unsigned, int);  // flags, priority
  int (*stream_wait)(void*, void*, unsigned);   // stream, event, flags
  int (*stream_capturing)(void*, int*);         // not 0: it records a graph
  int (*event_create)(void**, unsigned);
  int (*event_record)(void*, void*);
  int (*event_query)(void*);
  int (*event_destroy)(void*);

 private:
  int (*error_name_)(int, const char**);
  DynamicLibrary library_;
};

// The context in which torch uses a device (the primary one), retained for the lifetime of this
// object. `device`: torch's number. torch must have initialized the driver.
class DeviceContext {
 public:
  DeviceContext(std::shared_ptr<const CudaDriver> driver, int device);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  // Makes it current on this thread, and restores the previous one: autograd's threads have others.
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

// A stream of the device's highest priority: a few copying blocks must not wait for the many
// computing ones. It does not wait for the legacy default stream, nor vice versa.
//
// It outlives its owner, and is reused by the next one: torch's allocator records events on it when
// it frees memory that was used there, at any time.
class Stream {
 public:
  explicit Stream(std::shared_ptr<const DeviceContext> context);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void* handle() const { return stream_; }  // a CUstream, which torch can use as an external stream
  // Whether work on it is recorded into a CUDA graph at present.
  bool capturing() const;
  // Excludes it from reuse after this owner: its work may never end. From any thread.
  void retire() { retired_ = true; }

 private:
  std::shared_ptr<const DeviceContext> context_;
  void* stream_ = nullptr;
  std::atomic<bool> retired_ = false;
};

// A point in a stream's order. The calls need the context to be current.
class Event {
 public:
  explicit Event(std::shared_ptr<const DeviceContext> context);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // Work on `stream` so far precedes later work on any stream that awaits this event. Recording
  // again moves the point; waits that were put on a stream before keep the earlier one.
  void record(void* stream);
  // Later work on `stream` waits for the point. The host does not.
  void delay(void* stream) const;
  // Whether the device has passed the point: true before the first record. Never waits.
  bool reached() const;

 private:
  std::shared_ptr<const DeviceContext> context_;
  void* event_ = nullptr;
};

}  // namespace pydist::comm
