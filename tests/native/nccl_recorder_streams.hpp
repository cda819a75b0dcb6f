// The recorder's streams and events, and its notes; see driver_recorder.cpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

// Of the simulated device (tests/simulated/memory.cpp), where there is one: whether what the
// calling thread puts on its stream goes into a graph, and the way there.
extern "C" __attribute__((weak)) bool simulated_capturing();
extern "C" __attribute__((weak)) void simulated_capture(const std::function<void()>& call);

namespace recorder {

// Whether the stream 0, the calling thread, is captured.
inline bool thread_is_captured() { return simulated_capturing != nullptr && simulated_capturing(); }

inline std::mutex noting;
inline std::string notes;  // a line a call
inline long delay_us = 0;  // of every operation on a stream

inline void note(const std::string& line) {
  const std::lock_guard lock(noting);
  notes += line + "\n";
}

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  long recorded = 0, completed = 0;
  int number = 0;
  bool captured = false;           // recorded last while a graph was captured,
  class Stream* stream = nullptr;  // on this stream,
  long operations = 0;             // behind so many operations of it

  void complete(long count) {
    const std::lock_guard lock(mutex);
    completed = std::max(completed, count);
    changed.notify_all();
  }
  void await(long count) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return completed >= count; });
  }
};

class Stream {
 public:
  explicit Stream(int number) : number_(number), worker_([this] { work(); }) {}
  ~Stream() {
    put(nullptr);
    worker_.join();
  }
  // Now, or in each replay of the graph that is being captured.
  void put(std::function<void()> operation) {
    if (captured && operation) {
      ++captured_operations;
      simulated_capture([this, operation = std::move(operation)] { queue(operation); });
    } else {
      queue(std::move(operation));
    }
  }
  int number() const { return number_; }

  // Set by a wait for an event of a captured stream, until that capture ends. Used by one thread.
  std::atomic<bool> captured = false;
  long captured_operations = 0;
  long joined_operations = 0;  // of these, those that the captured thread waits for

 private:
  void queue(std::function<void()> operation) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(operation));
    changed_.notify_all();
  }
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const std::function<void()> operation = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (!operation) return;
      if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      operation();
    }
  }

  int number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread worker_;  // last: it uses the others
};

inline std::string name_of(const Stream* stream) {
  return stream == nullptr ? "caller" : "stream " + std::to_string(stream->number());
}

}  // namespace recorder
