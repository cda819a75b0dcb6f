// Scratch memory that is kept from call to call: fresh pages would cost more than the kernels.
//
// Kernels hold it as `static thread_local Scratch`, so it needs no lock and stays near its thread.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "core/index.hpp"

namespace pydist::cpu {

// One block of memory that grows as needed and belongs to the requesting thread.
class Scratch {
 public:
  // `count` elements of T, aligned to a cache line, with any content. Valid until the next call.
  template <class T>
  T* take(index_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    if (bytes > size_) {
      block_.reset();
      size_ = 0;
      block_.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
      size_ = bytes;
    }
    return reinterpret_cast<T*>(block_.get());
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Deleter {
    void operator()(std::byte* block) const { ::operator delete(block, kAlignment); }
  };
  std::unique_ptr<std::byte, Deleter> block_;
  std::size_t size_ = 0;
};

}  // namespace pydist::cpu
