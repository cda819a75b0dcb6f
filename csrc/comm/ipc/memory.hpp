// Memory of this rank's device that other processes write to, and their memory as mapped here.
//
// It is allocated here, in blocks that are exported once, and not by torch: torch's allocator may
// use virtual memory, which has no such handle, and may free it at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/ipc/driver.hpp"

namespace pydist::comm {

// An address in the memory of a rank, for other processes.
struct IpcAddress {
  IpcHandle block;
  std::uint64_t offset = 0;
};

// A piece of a block.
struct IpcAllocation {
  std::byte* address = nullptr;
  std::size_t bytes = 0;
  IpcAddress place;
};

// Blocks of one size that pieces are cut from. Returned pieces are reused for their size; a piece
// that is larger than a block gets its own block.
class IpcArena {
 public:
  // zeros: whether new pieces are zeroed.
  IpcArena(std::shared_ptr<const IpcDriver> driver, std::size_t block_bytes, bool zeros);

  // `bytes` > 0. The context is current; `stream` zeroes new blocks, after its own earlier work.
  IpcAllocation take(std::size_t bytes, void* stream, bool capturing);
  // The piece is free when the event `after` is reached, or now if there is none.
  void recycle(const IpcAllocation& piece, std::shared_ptr<Event> after);
  void release();

 private:
  struct Returned {
    IpcAllocation piece;
    std::shared_ptr<Event> after;
  };

  IpcAllocation new_block(std::size_t bytes, void* stream);
  void collect();

  std::shared_ptr<const IpcDriver> driver_;
  std::size_t block_bytes_;
  bool zeros_;
  std::deque<IpcAllocation> blocks_;  // blocks of a single piece come first
  std::size_t used_ = 0;              // of the last block
  std::multimap<std::size_t, IpcAllocation> free_;
  std::vector<Returned> returned_;
};

// All IPC memory of a rank. The calls may come from any thread.
class IpcMemory {
 public:
  // block_bytes: of the blocks that receive memory is cut from.
  IpcMemory(std::shared_ptr<const CudaDriver> driver, int device, std::size_t block_bytes);

  const IpcDriver& driver() const { return *driver_; }
  const std::shared_ptr<const DeviceContext>& context() const { return context_; }
  bool flushes() const { return flushes_; }

  // Flags are zero when they are taken, and must be zero when they are returned.
  IpcAllocation take_flags(std::size_t count, const Stream& stream);
  IpcAllocation take_buffer(std::size_t bytes, const Stream& stream);
  void recycle(const IpcAllocation& flags, const IpcAllocation& buffer,
               std::shared_ptr<Event> after);

  // The address of another rank's place in this process. Each block is mapped once.
  std::byte* mapped(const IpcAddress& place);

  // At the end: first all ranks unmap others' memory, then each releases its own. The destructor
  // does neither, as others may still write here.
  void unmap();
  void release();

 private:
  std::shared_ptr<const IpcDriver> driver_;
  std::shared_ptr<const DeviceContext> context_;
  bool flushes_;
  IpcArena flags_, buffers_;
  std::map<IpcHandle, std::byte*> mapped_;
  std::mutex mutex_;
};

}  // namespace pydist::comm
