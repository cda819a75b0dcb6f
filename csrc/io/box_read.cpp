// One pread for each run of a box.
#include "io/box_read.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <vector>

namespace pydist::io {
namespace {

constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;  // some systems read less than 2 GiB

std::uint64_t product(std::uint64_t a, std::uint64_t b) {
  std::uint64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result) || result > std::numeric_limits<std::int64_t>::max()) {
    throw std::invalid_argument("the array is too large");
  }
  return result;
}

void read_run(int descriptor, std::uint64_t offset, std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = ::pread(descriptor, out.data(), std::min(out.size(), kMostAtOnce),
                                static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw std::system_error(errno, std::generic_category());
    if (got == 0) throw std::system_error(0, std::generic_category());
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

}  // namespace

void read_box(const FileArray& array, std::span<const std::int64_t> lo,
              std::span<const std::int64_t> hi, std::span<std::byte> out) {
  const std::size_t dims = array.shape.size();
  if (lo.size() != dims || hi.size() != dims) {
    throw std::invalid_argument("the box has other dims than the array");
  }
  std::vector<std::uint64_t> steps(dims);  // bytes from an index to the next one
  std::uint64_t whole = array.item, wanted = array.item;
  for (std::size_t d = dims; d-- > 0;) {
    if (lo[d] < 0 || lo[d] > hi[d] || hi[d] > array.shape[d]) {
      throw std::invalid_argument("the box is not in the array");
    }
    steps[d] = whole;
    whole = product(whole, static_cast<std::uint64_t>(array.shape[d]));
    wanted = product(wanted, static_cast<std::uint64_t>(hi[d] - lo[d]));
  }
  if (array.offset > std::numeric_limits<std::int64_t>::max() - whole) {
    throw std::invalid_argument("the array is too large");
  }
  if (wanted != out.size()) throw std::invalid_argument("the box has another size than its memory");
  if (out.empty()) return;

  // A run has all of the inner dims, and a range of one; `outer` dims are stepped through.
  std::size_t outer = dims;
  std::uint64_t run = array.item;
  while (outer > 0) {
    --outer;
    run = steps[outer] * static_cast<std::uint64_t>(hi[outer] - lo[outer]);
    if (hi[outer] - lo[outer] < array.shape[outer]) break;
  }
  std::uint64_t position = array.offset;
  for (std::size_t d = 0; d < dims; ++d) position += steps[d] * static_cast<std::uint64_t>(lo[d]);
  std::vector<std::int64_t> index(lo.begin(), lo.end());
  while (true) {
    read_run(array.descriptor, position, out.first(static_cast<std::size_t>(run)));
    out = out.subspan(static_cast<std::size_t>(run));
    if (out.empty()) return;
    std::size_t d = outer;
    while (true) {  // the next run: an odometer over the outer dims
      --d;
      position += steps[d];
      if (++index[d] < hi[d]) break;
      position -= steps[d] * static_cast<std::uint64_t>(hi[d] - lo[d]);
      index[d] = lo[d];
    }
  }
}

}  // namespace pydist::io
