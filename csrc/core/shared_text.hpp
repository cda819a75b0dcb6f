// Text in memory that other processes read while it is written.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace pydist {

// Text of up to 8 * Words bytes. A reader may see a text that is half old, half new, so it is for
// reports, not for decisions. Memory of zeros is an empty text.
//
// Made of atomic words, so that concurrent access is no data race, and without locks: a process
// that is killed while it writes blocks no reader. The order of words is not defined (relaxed):
// what must be seen before the text, or after it, needs an atomic of its own.
template <std::size_t Words>
class SharedText {
 public:
  // One writer at a time. Longer text is cut, possibly within a character of UTF-8; a null byte
  // ends it.
  void store(std::string_view text) {
    std::array<char, 8 * Words> bytes{};
    std::memcpy(bytes.data(), text.data(), std::min(text.size(), bytes.size()));
    for (std::size_t i = 0; i < Words; ++i) {
      std::uint64_t word;
      std::memcpy(&word, bytes.data() + 8 * i, 8);
      words_[i].store(word, std::memory_order_relaxed);
      if (8 * (i + 1) > text.size()) break;  // the rest is never read
    }
  }

  // A copy of the text, from any process.
  std::string load() const {
    std::array<char, 8 * Words> bytes{};
    for (std::size_t i = 0; i < Words; ++i) {
      const std::uint64_t word = words_[i].load(std::memory_order_relaxed);
      std::memcpy(bytes.data() + 8 * i, &word, 8);
    }
    return {bytes.data(), strnlen(bytes.data(), bytes.size())};
  }

 private:
  std::array<std::atomic<std::uint64_t>, Words> words_;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace pydist
