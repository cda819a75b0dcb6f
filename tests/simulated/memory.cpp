#include "memory.hpp"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace simulated {

// Whoever reads memory before it is written, or after it is freed, finds NaN.
constexpr int kPoison = 0xff;

struct Block {
  Block(std::size_t size, std::shared_ptr<Graph> owner)
      : data(c10::GetCPUAllocator()->allocate(size)), bytes(size), graph(std::move(owner)) {
    if (bytes > 0) std::memset(data.get(), kPoison, bytes);
  }
  c10::DataPtr data;
  std::size_t bytes;
  std::set<void*> streams;     // that were said to use it
  std::weak_ptr<Graph> graph;  // in whose capture it was allocated
};

namespace {

std::mutex memory;

// By address. Never destroyed: torch frees its last tensors after static objects.
std::unordered_map<void*, Block*>& blocks() {
  static auto& all = *new std::unordered_map<void*, Block*>;
  return all;
}
std::map<std::uintptr_t, std::size_t>& pinned() {
  static auto& all = *new std::map<std::uintptr_t, std::size_t>;
  return all;
}

void drop(Block* block) {
  if (block->bytes > 0) std::memset(block->data.get(), kPoison, block->bytes);
  delete block;
}

// Drops a block when all streams that use it have come so far: through one after the other.
void drop_behind(Block* block) {
  if (block->streams.empty()) return drop(block);
  struct Rest {
    Block* block;
    std::vector<void*> streams;
    static void next(void* given) {
      auto* rest = static_cast<Rest*>(given);
      if (rest->streams.empty()) {
        drop(rest->block);
        delete rest;
        return;
      }
      void* const stream = rest->streams.back();
      rest->streams.pop_back();
      put_on_stream(stream, &Rest::next, rest);
    }
  };
  Rest::next(new Rest{block, {block->streams.begin(), block->streams.end()}});
}

// Blocks of before a capture that were freed in it: on its streams that would be done again by each
// replay. Torch's allocator waits for the end as well.
std::vector<Block*> freed_in_capture;

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    const std::lock_guard lock(memory);
    blocks().erase(block->data.get());
    usage().now -= block->bytes;
    if (const std::shared_ptr<Graph> graph = block->graph.lock()) {
      graph->pool.push_back(block);
      return;
    }
    if (captured != nullptr && !block->streams.empty()) {
      freed_in_capture.push_back(block);
      return;
    }
  }
  drop_behind(block);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, kDevice};
    auto* block = new Block(bytes, capturing() ? captured : nullptr);
    void* const address = block->data.get();
    const std::lock_guard lock(memory);
    blocks()[address] = block;
    usage().now += bytes;
    usage().peak = std::max(usage().peak, usage().now);
    return {address, block, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
};

struct PinnedAllocator final : c10::Allocator {
  struct Pinned {
    c10::DataPtr data;
  };
  static void release(void* context) {
    auto* block = static_cast<Pinned*>(context);
    {
      const std::lock_guard lock(memory);
      pinned().erase(reinterpret_cast<std::uintptr_t>(block->data.get()));
    }
    delete block;
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* block = new Pinned{c10::GetCPUAllocator()->allocate(bytes)};
    void* const address = block->data.get();
    const std::lock_guard lock(memory);
    pinned()[reinterpret_cast<std::uintptr_t>(address)] = bytes;
    return {address, block, &PinnedAllocator::release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
};

}  // namespace

Graph::~Graph() {
  for (Block* block : pool) drop(block);
}

namespace {

std::mutex joining;
std::set<c10::StreamId> joined_streams;

}  // namespace

bool is_captured(c10::StreamId stream) {
  const c10::StreamId first = captured_stream;
  if (first == -1 || first == stream) return first == stream;
  const std::lock_guard lock(joining);
  return joined_streams.contains(stream);
}

void join_capture(c10::StreamId stream) {
  const std::lock_guard lock(joining);
  if (captured_stream != -1) joined_streams.insert(stream);
}

void begin_capture() {
  TORCH_CHECK(captured == nullptr, "another graph is being captured");
  TORCH_CHECK(current_stream != 0,
              "CUDA graphs must be captured on a non-default stream. (However, after capture, "
              "it's ok to replay them on the default stream.)");
  captured = std::make_shared<Graph>();
  captured_stream = current_stream;
}

std::shared_ptr<Graph> end_capture() {
  captured_stream = -1;
  {
    const std::lock_guard lock(joining);
    joined_streams.clear();
  }
  std::shared_ptr<Graph> graph = std::exchange(captured, nullptr);
  for (const auto& [address, bytes] : graph->before) {
    std::memcpy(address, bytes.data(), bytes.size());
  }
  graph->before.clear();
  const bool joined = capture_ends();
  for (Block* block : std::exchange(freed_in_capture, {})) drop_behind(block);
  TORCH_CHECK(!graph->failed,
              "CUDA error: operation failed due to a previous error during capture");
  TORCH_CHECK(joined, "CUDA error: capturing stream has unjoined work");
  return graph;
}

void remember(void* address) {
  const std::lock_guard lock(memory);
  const auto found = blocks().find(address);
  if (found == blocks().end() || found->second->graph.lock() == captured) return;
  if (captured->before.contains(address)) return;
  const char* const bytes = static_cast<const char*>(address);
  captured->before[address].assign(bytes, bytes + found->second->bytes);
}

c10::Allocator& device_allocator() {
  static auto& allocator = *new DeviceAllocator;
  return allocator;
}

void used_on(void* address, void* stream) {
  const std::lock_guard lock(memory);
  const auto found = blocks().find(address);
  if (found != blocks().end() && stream != nullptr) found->second->streams.insert(stream);
}

c10::Allocator& pinned_allocator() {
  static auto& allocator = *new PinnedAllocator;
  return allocator;
}

bool is_pinned(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(memory);
  auto after = pinned().upper_bound(address);
  if (after == pinned().begin()) return false;
  --after;
  return address < after->first + std::max<std::size_t>(after->second, 1);
}

Usage& usage() {
  static Usage all;
  return all;
}

}  // namespace simulated

// What pydist asks an MPI: this memory is the host's, which every MPI takes.
extern "C" __attribute__((visibility("default"))) int MPIX_Query_cuda_support() { return 1; }

// For the recorder and the emulated kernels, which put their own on the streams.
extern "C" __attribute__((visibility("default"))) bool simulated_capturing() {
  return simulated::capturing();
}
extern "C" __attribute__((visibility("default"))) void simulated_capture(
    const std::function<void()>& call) {
  simulated::captured->calls.push_back(call);
}
