// Objects that are made at their first use, for the rest of the process.
#pragma once

#include <atomic>
#include <memory>

namespace pydist {

// Returns the object at `place`. Without one, makes it: make() returns a std::unique_ptr<T>.
// Several threads may make one at the same time; all get the one that is published first. There is
// no lock, which a fork could leave held in the child, as that of a static variable. If `make`
// throws, the next call tries again.
template <class T, class Make>
const T& published(std::atomic<const T*>& place, Make make) {
  const T* known = place.load(std::memory_order_acquire);
  if (known != nullptr) return *known;
  std::unique_ptr<const T> made = make();
  if (place.compare_exchange_strong(known, made.get())) return *made.release();
  return *known;
}

}  // namespace pydist
