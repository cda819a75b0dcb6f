// Reads of files, from this folder or from servers.
#include "packs/folder.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>

#include "core/errors.hpp"
#include "io/crc32c.hpp"
#include "packs/codec.hpp"
#include "packs/system.hpp"

namespace pydist::packs {
namespace {

constexpr int kClosed = -1, kElsewhere = -2;                 // of descriptors
constexpr std::size_t kRemotePiece = std::size_t{16} << 20;  // in one round trip

// Opens a partition's file, whose header must agree with the index.
Descriptor open_partition(const std::string& file, std::uint32_t number, const Index& index) {
  Descriptor descriptor(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (descriptor.get() < 0 && errno == EMFILE) {
    throw UsageError(file +
                     ": this process has too many open files (ulimit -n); a pack's reader has " +
                     "up to " + std::to_string(index.partitions()) + " partitions open");
  }
  if (descriptor.get() < 0) throw_system(file);
  struct stat status{};
  if (::fstat(descriptor.get(), &status) != 0) throw_system(file);
  if (!S_ISREG(status.st_mode)) throw PackError(file + ": not a regular file");
  PartitionHeader header{};
  const ssize_t got = ::pread(descriptor.get(), &header, sizeof(header), 0);
  if (got < 0) throw_system(file);
  if (got < static_cast<ssize_t>(sizeof(header)) || header.magic != kPartitionMagic) {
    throw PackError(file + ": not a partition of a pack");
  }
  if (header.version != kVersion) {
    throw PackError(file + ": version " + std::to_string(header.version) +
                    ", and this pydist reads version " + std::to_string(kVersion));
  }
  if (header.crc != io::crc32c(&header, offsetof(PartitionHeader, crc))) {
    throw PackError(file + ": damaged: its header does not match its checksum");
  }
  if (header.id != index.id() || header.number != number) {
    throw PackError(file + ": it belongs to another pack than " + index.file());
  }
  const auto size = static_cast<std::uint64_t>(status.st_size);
  const std::uint64_t expected = index.partition_size(number);
  if (size != expected || header.file_size != expected) {
    throw PackError(file + ": damaged: it has " + std::to_string(size) + " bytes of " +
                    std::to_string(expected));
  }
  return descriptor;
}

}  // namespace

Folder::Folder(const std::string& path)
    : path_(path),
      index_(Index::open(path + "/" + kIndexName)),
      descriptors_(std::make_unique<std::atomic<int>[]>(index_.partitions())),
      maps_(index_.partitions()) {
  for (std::uint32_t i = 0; i < index_.partitions(); ++i) descriptors_[i].store(kClosed);
}

Folder::Folder(const std::string& path, const std::vector<std::string>& servers,
               const Secret& secret)
    : Folder(path) {
  if (servers.empty()) return;
  remote_ = std::make_unique<Remote>(servers, secret, index_.id(), index_.partitions());
}

Folder::~Folder() {
  for (std::uint32_t i = 0; i < index_.partitions(); ++i) {
    const Descriptor closed(descriptors_[i].load());
  }
}

bool Folder::is_here(std::uint32_t partition) const {
  index_.partition_size(partition);
  int number = descriptors_[partition].load(std::memory_order_acquire);
  if (number == kClosed && ::access((path_ + "/" + partition_name(partition)).c_str(), F_OK) != 0 &&
      errno == ENOENT) {
    if (remote_ == nullptr) return false;
    descriptors_[partition].compare_exchange_strong(number, kElsewhere);
    return false;
  }
  return number != kElsewhere;
}

int Folder::partition_fd(std::uint32_t partition) const {
  index_.partition_size(partition);  // throws for one that the index does not have
  int number = descriptors_[partition].load(std::memory_order_acquire);
  if (number >= 0) return number;
  number = kClosed;
  Descriptor opened = open_partition(path_ + "/" + partition_name(partition), partition, index_);
  // Another thread may have opened it meanwhile; then its descriptor is used.
  if (descriptors_[partition].compare_exchange_strong(number, opened.get())) {
    return opened.release();
  }
  if (number >= 0) return number;
  throw PackError(path_ + "/" + partition_name(partition) + ": it appeared while it was read");
}

const Entry& Folder::file(std::uint32_t entry) const {
  const Entry& found = index_.entry(entry);
  if (found.kind != EntryKind::kFile)
    throw PackError(index_.path(entry) + ": a directory, not a file");
  if (remote_ == nullptr || is_here(found.partition)) partition_fd(found.partition);
  const std::uint64_t size = index_.partition_size(found.partition);
  if (found.offset > size || found.stored_size > size - found.offset) {
    damaged(entry, "it is outside of its partition");
  }
  const std::string fault = fault_of_sizes(found);
  if (!fault.empty()) damaged(entry, "it " + fault);
  return found;
}

Stored Folder::stored(std::uint32_t i) const {
  const Entry& entry = file(i);
  return {entry.offset,  entry.stored_size, entry.raw_size, entry.partition,
          entry.raw_crc, entry.stored_crc,  entry.codec};
}

void Folder::damaged(std::uint32_t entry, const std::string& reason) const {
  throw PackError(path_ + ": " + index_.path(entry) + ": damaged: " + reason);
}

void Folder::read_stored(std::uint32_t i, std::uint64_t offset, std::span<std::byte> out) const {
  const Entry& entry = index_.entry(i);
  if (remote_ != nullptr && !is_here(entry.partition)) {
    return remote_->read({i, 0, offset, out.size()}, entry.partition, out);
  }
  const int descriptor = partition_fd(entry.partition);
  while (!out.empty()) {
    const ssize_t got =
        ::pread(descriptor, out.data(), out.size(), static_cast<off_t>(entry.offset + offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      const std::string file = path_ + "/" + partition_name(entry.partition);
      if (got < 0) throw_system(file);
      throw PackError(file + ": damaged: it was cut short");
    }
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

void Folder::read(std::uint32_t i, std::span<std::byte> out) const {
  const Entry& entry = file(i);
  if (out.size() != entry.raw_size) {
    throw PackError(index_.path(i) + ": it has " + std::to_string(entry.raw_size) +
                    " bytes, and was read into " + std::to_string(out.size()));
  }
  const auto fetch = [&](std::uint64_t offset, std::span<std::byte> bytes) {
    read_stored(i, offset, bytes);
  };
  try {
    if (const std::span<const std::byte> bytes = resident(entry); !bytes.empty()) {
      return copy_whole(stored(i), bytes, out);
    }
    read_whole(stored(i), fetch, out, piece_of(entry));
  } catch (const Damage& damage) {
    damaged(i, damage.what());
  }
}

void Folder::pass(std::uint32_t i, const Take& take) const {
  const auto fetch = [&](std::uint64_t offset, std::span<std::byte> bytes) {
    read_stored(i, offset, bytes);
  };
  try {
    pass_whole(stored(i), fetch, take, piece_of(index_.entry(i)));
  } catch (const Damage& damage) {
    damaged(i, damage.what());
  }
}

std::span<const std::byte> Folder::resident(const Entry& entry) const {
  const bool large = entry.codec == Codec::kRaw && entry.raw_size >= kMappedFile;
  if (!large || !is_here(entry.partition)) return {};
  return maps_.resident(entry.partition, partition_fd(entry.partition),
                        index_.partition_size(entry.partition), entry.offset, entry.raw_size);
}

std::size_t Folder::piece_of(const Entry& entry) const {
  return remote_ == nullptr || is_here(entry.partition) ? kCachedPiece : kRemotePiece;
}

std::size_t Folder::pread(std::uint32_t i, std::uint64_t offset, std::span<std::byte> out) const {
  const Entry& entry = file(i);
  if (entry.codec != Codec::kRaw) {
    throw PackError(index_.path(i) + ": it is compressed, and can only be read whole");
  }
  if (offset >= entry.raw_size) return 0;
  out = out.first(
      static_cast<std::size_t>(std::min<std::uint64_t>(out.size(), entry.raw_size - offset)));
  read_stored(i, offset, out);
  return out.size();
}

void Folder::check(std::uint32_t i) const {
  pass(i, [](std::uint64_t, std::span<const std::byte>) {});
}

}  // namespace pydist::packs
