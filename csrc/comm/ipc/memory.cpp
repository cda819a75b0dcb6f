// Blocks of device memory that other processes map, and the pieces that channels take from them.
#include "comm/ipc/memory.hpp"

#include <algorithm>
#include <utility>

namespace pydist::comm {
namespace {

constexpr std::size_t kFlagBlock = std::size_t{64} << 10;
constexpr std::size_t kAlignment = 256;  // of pieces, as cuMemAlloc guarantees

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

IpcArena::IpcArena(std::shared_ptr<const IpcDriver> driver, std::size_t block_bytes, bool zeros)
    : driver_(std::move(driver)), block_bytes_(block_bytes), zeros_(zeros) {}

// A returned piece of that size, else a new one: from a block, or a separate block.
IpcAllocation IpcArena::take(std::size_t bytes, void* stream, bool capturing) {
  bytes = aligned(bytes);
  if (!capturing) collect();  // events must not be queried while a graph is captured
  if (const auto found = free_.find(bytes); found != free_.end()) {
    const IpcAllocation piece = found->second;
    free_.erase(found);
    return piece;
  }
  if (bytes > block_bytes_) {
    blocks_.push_front(new_block(bytes, stream));
    if (blocks_.size() == 1) used_ = bytes;  // or it would be the last one, with room
    return blocks_.front();
  }
  if (blocks_.empty() || used_ + bytes > blocks_.back().bytes) {
    blocks_.push_back(new_block(block_bytes_, stream));
    used_ = 0;
  }
  const IpcAllocation& block = blocks_.back();
  const IpcAllocation piece{block.address + used_, bytes, {block.place.block, used_}};
  used_ += bytes;
  return piece;
}

IpcAllocation IpcArena::new_block(std::size_t bytes, void* stream) {
  IpcAllocation block{driver_->allocate(bytes), bytes, {}};
  try {
    if (zeros_) driver_->clear(block.address, bytes, stream);
    block.place.block = driver_->export_block(block.address);
  } catch (const DriverError&) {
    driver_->release(block.address);
    throw;
  }
  return block;
}

void IpcArena::recycle(const IpcAllocation& piece, std::shared_ptr<Event> after) {
  returned_.push_back({piece, std::move(after)});
}

// Pieces whose event was reached may be taken again, for the same number of bytes.
void IpcArena::collect() {
  std::erase_if(returned_, [this](const Returned& each) {
    if (each.after && !each.after->reached()) return false;
    free_.emplace(each.piece.bytes, each.piece);
    return true;
  });
}

void IpcArena::release() {
  for (const IpcAllocation& each : std::exchange(blocks_, {})) driver_->release(each.address);
  free_.clear();
  returned_.clear();
  used_ = 0;
}

IpcMemory::IpcMemory(std::shared_ptr<const CudaDriver> driver, int device, std::size_t block_bytes)
    : driver_(std::make_shared<IpcDriver>(driver)),
      context_(std::make_shared<DeviceContext>(std::move(driver), device)),
      flushes_(driver_->can_flush(context_->device())),
      flags_(driver_, kFlagBlock, true),
      buffers_(driver_, block_bytes, false) {}

IpcAllocation IpcMemory::take_flags(std::size_t count, const Stream& stream) {
  const std::lock_guard lock(mutex_);
  const DeviceContext::Current current(*context_);
  return flags_.take(count * sizeof(Flag), stream.handle(), stream.capturing());
}

IpcAllocation IpcMemory::take_buffer(std::size_t bytes, const Stream& stream) {
  const std::lock_guard lock(mutex_);
  const DeviceContext::Current current(*context_);
  return buffers_.take(bytes, stream.handle(), stream.capturing());
}

void IpcMemory::recycle(const IpcAllocation& flags, const IpcAllocation& buffer,
                        std::shared_ptr<Event> after) {
  const std::lock_guard lock(mutex_);
  if (flags.bytes > 0) flags_.recycle(flags, after);
  if (buffer.bytes > 0) buffers_.recycle(buffer, std::move(after));
}

std::byte* IpcMemory::mapped(const IpcAddress& place) {
  const std::lock_guard lock(mutex_);
  const DeviceContext::Current current(*context_);
  auto found = mapped_.find(place.block);
  if (found == mapped_.end()) {
    found = mapped_.emplace(place.block, driver_->map(place.block)).first;
  }
  return found->second + place.offset;
}

void IpcMemory::unmap() {
  const std::lock_guard lock(mutex_);
  const DeviceContext::Current current(*context_);
  for (const auto& [handle, block] : std::exchange(mapped_, {})) driver_->unmap(block);
}

void IpcMemory::release() {
  const std::lock_guard lock(mutex_);
  const DeviceContext::Current current(*context_);
  flags_.release();
  buffers_.release();
}

}  // namespace pydist::comm
