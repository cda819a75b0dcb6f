// Partitions are appended to; an index is collected and written at the end.
#include "packs/writer.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "io/crc32c.hpp"
#include "packs/codec.hpp"

namespace pydist::packs {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 22;

[[noreturn]] void throw_written(const std::string& file) {
  throw WriteError(file + ": " + std::generic_category().message(errno));
}

// Reads up to `size` bytes; fewer only at the end of the file.
std::size_t read_at(int file, std::byte* bytes, std::size_t size, std::uint64_t offset) {
  std::size_t done = 0;
  while (done < size) {
    const ssize_t got = ::pread(file, bytes + done, size - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw PackError(std::generic_category().message(errno));
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  return done;
}

}  // namespace

PartitionWriter::PartitionWriter(std::string file, std::uint32_t number, const PackId& id)
    : file_(std::move(file)),
      descriptor_(::open(file_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
  if (descriptor_.get() < 0) throw_written(file_);
  header_.magic = kPartitionMagic;
  header_.version = kVersion;
  header_.number = number;
  header_.id = id;
}

void PartitionWriter::write(const void* bytes, std::size_t size, std::uint64_t offset) {
  const auto* next = static_cast<const std::byte*>(bytes);
  while (size > 0) {
    const ssize_t put = ::pwrite(descriptor_.get(), next, size, static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw_written(file_);
    next += put;
    offset += static_cast<std::uint64_t>(put);
    size -= static_cast<std::size_t>(put);
  }
}

// The place after the last file, for a file of `size` bytes that is stored raw.
Stored PartitionWriter::placed(std::uint64_t size) const {
  Stored stored;
  stored.partition = header_.number;
  // An empty file is at the header's end, which every partition has.
  const std::uint64_t unit = size < kLargeFile ? kAlignment : kPage;
  if (size > 0) stored.offset = (end_ + unit - 1) / unit * unit;
  stored.raw_size = stored.stored_size = size;
  return stored;
}

// Writes bytes whose raw checksum is known, compressed if that makes them smaller.
void PartitionWriter::store(Stored& stored, std::span<const std::byte> bytes, Compression how) {
  std::vector<std::byte> compressed;
  if (how.codec != Codec::kRaw && bytes.size() <= kLargestCompressed) {
    compressed = compress(how, bytes);
    if (compressed.size() < bytes.size()) {
      bytes = compressed;
      stored.codec = how.codec;
      stored.stored_size = bytes.size();
      stored.stored_crc = io::crc32c(bytes.data(), bytes.size());
    }
  }
  write(bytes.data(), bytes.size(), stored.offset);
}

Stored PartitionWriter::append(int source, std::uint64_t size, Compression how) {
  Stored stored = placed(size);
  const bool whole = how.codec != Codec::kRaw && size <= kLargestCompressed;
  // One byte more than it should have shows that a file has grown.
  std::vector<std::byte> piece(whole ? size + 1 : std::min<std::uint64_t>(kPiece, size + 1));
  for (std::uint64_t done = 0;;) {
    const std::size_t got = read_at(source, piece.data(), piece.size(), done);
    stored.raw_crc = io::crc32c(piece.data(), got, stored.raw_crc);
    done += got;
    if (done > size || (got < piece.size() && done < size)) {
      throw PackError("it changed while it was packed");
    }
    if (!whole) write(piece.data(), got, stored.offset + done - got);
    if (got < piece.size()) break;
  }
  stored.stored_crc = stored.raw_crc;
  if (whole) store(stored, {piece.data(), size}, how);
  if (size > 0) end_ = stored.offset + stored.stored_size;
  return stored;
}

Stored PartitionWriter::append(std::span<const std::byte> bytes, Compression how) {
  Stored stored = placed(bytes.size());
  stored.raw_crc = stored.stored_crc = io::crc32c(bytes.data(), bytes.size());
  store(stored, bytes, how);
  if (!bytes.empty()) end_ = stored.offset + stored.stored_size;
  return stored;
}

void PartitionWriter::read(const Stored& stored, std::span<std::byte> out) const {
  if (out.size() != stored.raw_size) {
    throw PackError(file_ + ": a file of " + std::to_string(stored.raw_size) +
                    " bytes was read into " + std::to_string(out.size()));
  }
  const auto fetch = [&](std::uint64_t offset, std::span<std::byte> bytes) {
    const std::uint64_t at = stored.offset + offset;
    if (read_at(descriptor_.get(), bytes.data(), bytes.size(), at) < bytes.size()) {
      throw Damage("it was cut short");
    }
  };
  try {
    read_whole(stored, fetch, out);
  } catch (const Damage& damage) {
    throw PackError(file_ + ": damaged: " + damage.what());
  } catch (const PackError& error) {
    throw PackError(file_ + ": " + error.what());
  }
}

std::uint64_t PartitionWriter::finish() {
  header_.file_size = end_;
  header_.crc = io::crc32c(&header_, offsetof(PartitionHeader, crc));
  // A failed append may have left bytes after the end.
  if (::ftruncate(descriptor_.get(), static_cast<off_t>(end_)) != 0) throw_written(file_);
  write(&header_, sizeof(header_), 0);
  if (::fsync(descriptor_.get()) != 0) throw_written(file_);
  return end_;
}

IndexWriter::IndexWriter(std::uint16_t mode, std::int64_t mtime_ns) {
  Entry root{};
  root.kind = EntryKind::kDirectory;
  root.mode = mode & kModeBits;
  root.mtime_ns = mtime_ns;
  root.offset = 1;
  entries_.push_back(root);
}

std::uint32_t IndexWriter::add(std::uint32_t parent, std::string_view name, EntryKind kind,
                               std::uint16_t mode, std::int64_t mtime_ns) {
  if (entries_.size() >= std::numeric_limits<std::uint32_t>::max()) {
    throw PackError("more than 4,294,967,295 files and folders");
  }
  const Entry& last = entries_.back();
  const bool first = entries_.size() == 1 || parent != last.parent;
  const bool ordered = parent < entries_.size() && entries_[parent].kind == EntryKind::kDirectory &&
                       parent >= last.parent &&
                       (first || std::string_view(names_).substr(last.name_offset) < name);
  if (!ordered || name.size() > std::numeric_limits<std::uint32_t>::max()) {
    throw PackError("entries were added in another order than that of an index");
  }
  const auto number = static_cast<std::uint32_t>(entries_.size());
  // Directories without entries have the range of none at the place where it would begin.
  for (std::uint32_t i = entries_.back().parent + 1; i <= parent; ++i) {
    if (entries_[i].kind == EntryKind::kDirectory) entries_[i].offset = number;
  }
  Entry entry{};
  entry.name_offset = names_.size();
  entry.name_size = static_cast<std::uint32_t>(name.size());
  entry.offset = kind == EntryKind::kFile ? sizeof(PartitionHeader) : 0;
  entry.mtime_ns = mtime_ns;
  entry.parent = parent;
  entry.kind = kind;
  entry.mode = mode & kModeBits;
  ++entries_[parent].stored_size;
  entries_.push_back(entry);
  names_ += name;
  return number;
}

void IndexWriter::store(std::uint32_t file, const Stored& stored) {
  if (file >= entries_.size() || entries_[file].kind != EntryKind::kFile) {
    throw PackError("entry " + std::to_string(file) + " is not a file");
  }
  Entry& entry = entries_[file];
  entry.offset = stored.offset;
  entry.stored_size = stored.stored_size;
  entry.raw_size = stored.raw_size;
  entry.partition = stored.partition;
  entry.raw_crc = stored.raw_crc;
  entry.stored_crc = stored.stored_crc;
  entry.codec = stored.codec;
}

std::vector<std::byte> IndexWriter::bytes(const PackId& id,
                                          const std::vector<std::uint64_t>& partitions,
                                          std::string_view origin) const {
  IndexHeader header{};
  header.magic = kIndexMagic;
  header.version = kVersion;
  header.header_size = sizeof(IndexHeader);
  header.id = id;
  header.entries = entries_.size();
  header.partitions = partitions.size();
  std::uint64_t end = sizeof(IndexHeader);
  const auto place = [&end](Table& table, std::uint64_t size) {
    table = {end, size};
    end += size;
  };
  place(header.entry_table, entries_.size() * sizeof(Entry));
  place(header.partition_table, partitions.size() * sizeof(std::uint64_t));
  place(header.names, names_.size());
  place(header.origin, origin.size());
  header.file_size = end;
  std::vector<std::byte> bytes(end);
  const auto copy = [&bytes](const Table& table, const void* from) {
    if (table.size > 0) std::memcpy(bytes.data() + table.offset, from, table.size);
  };
  copy(header.entry_table, entries_.data());
  copy(header.partition_table, partitions.data());
  copy(header.names, names_.data());
  copy(header.origin, origin.data());
  // Directories after the last one that has entries.
  auto* entries = reinterpret_cast<Entry*>(bytes.data() + header.entry_table.offset);
  for (std::size_t i = entries_.back().parent + 1; i < entries_.size(); ++i) {
    if (entries[i].kind == EntryKind::kDirectory) entries[i].offset = entries_.size();
  }
  header.body_crc = io::crc32c(bytes.data() + sizeof(header), end - sizeof(header));
  header.crc = io::crc32c(&header, offsetof(IndexHeader, crc));
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

}  // namespace pydist::packs
