// Opening, look-ups and listings; index_check.cpp has the full check.
#include "packs/index.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "io/crc32c.hpp"
#include "packs/system.hpp"

namespace pydist::packs {
namespace {

// The table's bytes as structs: aligned and of a whole number of them, as Index::table has checked.
template <class T>
std::span<const T> as(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

bool is_possible_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

Index Index::open(const std::string& file) {
  // O_NONBLOCK: a FIFO of this name must not block; it is refused below.
  const Descriptor descriptor(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (descriptor.get() < 0 && errno == ENOENT) {
    throw PackError(file + ": No such file or directory. The folder of a pack has this index; " +
                    "`pydist data pack SOURCE -o FOLDER` makes one");
  }
  if (descriptor.get() < 0) throw_system(file);
  struct stat status{};
  if (::fstat(descriptor.get(), &status) != 0) throw_system(file);
  if (!S_ISREG(status.st_mode)) throw PackError(file + ": not a regular file");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size == 0) throw PackError(file + ": empty, and not the index of a pack");
  void* start = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor.get(), 0);
  if (start == MAP_FAILED) throw_system(file);
  std::shared_ptr<const std::byte> mapping(
      static_cast<const std::byte*>(start),
      [size](const std::byte* mapped) { ::munmap(const_cast<std::byte*>(mapped), size); });
  const std::span<const std::byte> bytes(mapping.get(), size);
  return {file, bytes, std::move(mapping)};
}

Index Index::view(std::string file, std::span<const std::byte> bytes) {
  return {std::move(file), bytes, nullptr};
}

Index::Index(std::string file, std::span<const std::byte> bytes,
             std::shared_ptr<const std::byte> mapping)
    : file_(std::move(file)), bytes_(bytes), mapping_(std::move(mapping)) {
  if (bytes.size() < sizeof(IndexHeader)) {
    throw PackError(file_ + ": not the index of a pack: it has " + std::to_string(bytes.size()) +
                    " bytes, and its header alone has " + std::to_string(sizeof(IndexHeader)));
  }
  header_ = reinterpret_cast<const IndexHeader*>(bytes.data());
  if (header_->magic != kIndexMagic) throw PackError(file_ + ": not the index of a pack");
  if (header_->version != kVersion) {
    throw PackError(file_ + ": version " + std::to_string(header_->version) +
                    ", and this pydist reads version " + std::to_string(kVersion));
  }
  if (header_->header_size != sizeof(IndexHeader) ||
      header_->crc != io::crc32c(header_, offsetof(IndexHeader, crc))) {
    damaged("its header does not match its checksum");
  }
  if (header_->file_size != bytes_.size()) {
    damaged("it has " + std::to_string(bytes_.size()) + " bytes of " +
            std::to_string(header_->file_size));
  }
  entries_ = as<Entry>(table(header_->entry_table, sizeof(Entry), "entries"));
  partitions_ =
      as<std::uint64_t>(table(header_->partition_table, sizeof(std::uint64_t), "partitions"));
  names_ = as_text(table(header_->names, 1, "names"));
  origin_ = as_text(table(header_->origin, 1, "origin"));
  if (entries_.size() != header_->entries || partitions_.size() != header_->partitions) {
    damaged("its tables do not have the sizes that its header declares");
  }
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
  if (entries_.empty() || entries_.size() > kMost || partitions_.size() > kMost) {
    damaged("impossible numbers of entries or partitions");
  }
}

// The bytes of a table, after a check that it is within the file, after the header, has a whole
// number of units, and is aligned. Subtractions, not sums, are compared: these can't wrap.
std::span<const std::byte> Index::table(const Table& table, std::uint64_t unit,
                                        const char* what) const {
  const std::uint64_t alignment = unit == 1 ? 1 : alignof(std::uint64_t);
  if (table.offset < sizeof(IndexHeader) || table.offset > bytes_.size() ||
      table.size > bytes_.size() - table.offset || table.size % unit != 0 ||
      table.offset % alignment != 0) {
    damaged(std::string("the table of ") + what + " is outside of the file");
  }
  return bytes_.subspan(table.offset, table.size);
}

void Index::damaged(const std::string& reason) const {
  throw PackError(file_ + ": damaged: " + reason);
}

std::uint64_t Index::partition_size(std::uint32_t partition) const {
  if (partition >= partitions_.size()) {
    damaged("partition " + std::to_string(partition) + " of " + std::to_string(partitions_.size()));
  }
  return partitions_[partition];
}

const Entry& Index::entry(std::uint32_t i) const {
  if (i >= entries_.size()) {
    damaged("entry " + std::to_string(i) + " of " + std::to_string(entries_.size()));
  }
  return entries_[i];
}

std::string_view Index::name(std::uint32_t i) const {
  const Entry& found = entry(i);
  if (found.name_offset > names_.size() || found.name_size > names_.size() - found.name_offset) {
    damaged("the name of entry " + std::to_string(i) + " is outside of the table of names");
  }
  return names_.substr(found.name_offset, found.name_size);
}

std::string Index::path(std::uint32_t i) const {
  std::vector<std::string_view> names;
  std::size_t size = 0;
  while (i != 0) {
    names.push_back(name(i));
    size += names.back().size() + 1;
    const std::uint32_t parent = entry(i).parent;
    // Parents have smaller numbers, so this ends; no two entries share a name's bytes.
    if (parent >= i || !is_possible_name(names.back()) || size > names_.size() + names.size()) {
      damaged("entry " + std::to_string(i) + " has impossible parents or names");
    }
    i = parent;
  }
  std::string path;
  path.reserve(size);
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    if (!path.empty()) path += '/';
    path += *name;
  }
  return path;
}

// The numbers of a directory's children, unchecked but for their bounds. They are above its own, so
// a walk of an index that was not checked ends.
Index::Range Index::range(std::uint32_t directory) const {
  const Entry& found = entry(directory);
  if (found.kind != EntryKind::kDirectory) {
    throw PackError(file_ + ": entry " + std::to_string(directory) + " is a file, not a directory");
  }
  if (found.offset <= directory || found.offset > entries_.size() ||
      found.stored_size > entries_.size() - found.offset) {
    damaged("the children of entry " + std::to_string(directory) + " have impossible numbers");
  }
  return {static_cast<std::uint32_t>(found.offset), static_cast<std::uint32_t>(found.stored_size)};
}

void Index::require_child(std::uint32_t child, std::uint32_t directory) const {
  if (entry(child).parent != directory) {
    damaged("entry " + std::to_string(child) + " is not a child of entry " +
            std::to_string(directory));
  }
  if (!is_possible_name(name(child))) {
    damaged("entry " + std::to_string(child) + " has an impossible name");
  }
}

Index::Range Index::children(std::uint32_t directory) const {
  const Range found = range(directory);
  for (std::uint32_t i = 0; i < found.count; ++i) require_child(found.first + i, directory);
  return found;
}

// A stack instead of recursion: directories can be nested as deep as there are entries.
std::vector<std::uint32_t> Index::files(std::uint32_t directory) const {
  std::vector<std::uint32_t> files;
  std::vector<std::uint32_t> open = {directory};
  while (!open.empty()) {
    const std::uint32_t at = open.back();
    open.pop_back();
    if (entry(at).kind != EntryKind::kDirectory) {
      files.push_back(at);
      continue;
    }
    const auto [first, count] = children(at);
    for (std::uint32_t i = count; i > 0; --i) open.push_back(first + i - 1);
  }
  return files;
}

// A binary search by name. In an index that was not checked, names may be unsorted: then a child
// may not be found, and one that is found is checked.
std::optional<std::uint32_t> Index::child(std::uint32_t directory, std::string_view name) const {
  auto [first, count] = range(directory);
  const std::uint32_t end = first + count;
  while (count > 0) {
    const std::uint32_t half = count / 2;
    if (this->name(first + half) < name) {
      first += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  if (first == end || this->name(first) != name) return std::nullopt;
  require_child(first, directory);
  return first;
}

std::optional<std::uint32_t> Index::find(std::string_view path) const {
  std::uint32_t at = 0;
  while (!path.empty()) {
    const std::size_t slash = path.find('/');
    const std::string_view name = path.substr(0, slash);
    const bool last = slash == std::string_view::npos;
    if (name.empty() || entry(at).kind != EntryKind::kDirectory) return std::nullopt;
    const auto found = child(at, name);
    if (!found) return std::nullopt;
    at = *found;
    if (last) break;
    path.remove_prefix(slash + 1);
    if (path.empty()) return std::nullopt;  // a separator at the end
  }
  return at;
}

}  // namespace pydist::packs
