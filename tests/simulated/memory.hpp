// The memory of the simulated device, the graphs that own some of it, and torch's current stream.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace simulated {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::CUDA;
inline const c10::Device kDevice(kDeviceType, 0);

struct Block;

// What was put on a stream while it was captured, to be done again in each replay. Memory that was
// allocated meanwhile stays the graph's own; other memory is not kept.
struct Graph {
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();
  std::vector<std::function<void()>> calls;
  std::vector<Block*> pool;
  // Memory from before that calls have written to while they were captured, as it was: a capture
  // computes nothing.
  std::map<void*, std::vector<char>> before;
  bool failed = false;
};

// torch's current stream on this thread: its number. What is put on it has ended when the call
// returns.
inline thread_local c10::StreamId current_stream = 0;

// The graph that is being captured, and on which stream.
inline std::shared_ptr<Graph> captured;
inline std::atomic<c10::StreamId> captured_stream = -1;
// Whether a stream is captured: that one, or another that has waited for a captured one.
bool is_captured(c10::StreamId stream);
inline bool capturing() { return is_captured(current_stream); }
// Takes a stream into the capture.
void join_capture(c10::StreamId stream);

// Starts a capture on the current stream; throws where CUDA would.
void begin_capture();
std::shared_ptr<Graph> end_capture();

// Notes what memory from before the capture holds, as it is about to be written to.
void remember(void* address);

// Memory that is poisoned until it is written, and when it is freed. Freed, it waits for the
// streams that were said to use it.
c10::Allocator& device_allocator();
void used_on(void* address, void* stream);

c10::Allocator& pinned_allocator();
bool is_pinned(const void* data);

struct Usage {
  std::size_t now = 0, peak = 0;
};
Usage& usage();

// Of the recorder (tests/native/driver_recorder.cpp): puts a call on one of its streams, and says
// whether all of its streams that a capture took in were waited for.
using PutOnStream = void (*)(void* stream, void (*function)(void*), void* argument);
inline PutOnStream put_on_stream = nullptr;
inline bool (*capture_ends)() = nullptr;

}  // namespace simulated
