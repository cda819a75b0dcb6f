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

// Text of a fixed size; longer text is cut. A reader may see a text that is half old, half new, so
// it is for reports, not for decisions. Memory of zeros is an empty text.
template <std::size_t Words>
class SharedText {
 public:
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
