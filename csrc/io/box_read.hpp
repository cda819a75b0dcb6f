// Reads boxes of arrays that a file has uncompressed, in one piece, in row-major order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pydist::io {

// An array in an open file.
struct FileArray {
  int descriptor;
  std::uint64_t offset;  // of its first element, in bytes from the start of the file
  std::uint64_t item;    // bytes of an element
  std::span<const std::int64_t> shape;
};

// Reads the elements lo <= index < hi of an array into `out`, without a gap, in row-major order: by
// one pread for each run of elements that are next to each other in the file, and no other bytes.
// The file's position does not matter and is not moved. Throws std::invalid_argument unless the box
// is in the array and has `out`'s size, and std::system_error if a read fails; its code is 0
// (success) where the file ends within the array.
void read_box(const FileArray& array, std::span<const std::int64_t> lo,
              std::span<const std::int64_t> hi, std::span<std::byte> out);

}  // namespace pydist::io
