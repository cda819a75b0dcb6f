// One pass over an index that proves it whole.
#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "io/crc32c.hpp"
#include "packs/codec.hpp"
#include "packs/index.hpp"

namespace pydist::packs {
namespace {

// Returns the problem with an entry's own fields, or an empty string.
std::string fault_of(const Entry& entry) {
  if (entry.mode & ~kModeBits) return "has more than permission bits in its mode";
  if (entry.kind == EntryKind::kDirectory) {
    const bool zeros = entry.codec == Codec::kRaw && entry.raw_size == 0 && entry.partition == 0 &&
                       entry.raw_crc == 0 && entry.stored_crc == 0;
    return zeros ? "" : "is a directory with the fields of a file";
  }
  if (entry.kind != EntryKind::kFile) return "is neither a file nor a directory";
  if (entry.codec > Codec::kBlosc) return "has an unknown codec";
  if (entry.offset % kAlignment != 0 || entry.offset < sizeof(PartitionHeader)) {
    return "has an offset that is not aligned";
  }
  if (entry.codec == Codec::kRaw && entry.stored_crc != entry.raw_crc) {
    return "is not compressed, and has two checksums";
  }
  return fault_of_sizes(entry);
}

}  // namespace

void Index::check() const {
  if (io::crc32c(bytes_.data() + sizeof(IndexHeader), bytes_.size() - sizeof(IndexHeader)) !=
      header_->body_crc) {
    damaged("its content does not match its checksum");
  }
  if (entries_[0].kind != EntryKind::kDirectory || entries_[0].parent != 0 ||
      entries_[0].name_size != 0) {
    damaged("its first entry is not a root");
  }
  // The ranges of children, in the order of their directories, cover [1, size) without a gap.
  std::uint64_t next_child = 1, next_name = 0;
  for (std::uint32_t i = 0; i < size(); ++i) {
    check_entry(i, next_child, next_name);
    next_name += entries_[i].name_size;
    if (entries_[i].kind == EntryKind::kDirectory) next_child += children(i).count;
  }
  if (next_child != size()) damaged("it has entries without a directory");
  if (next_name != names_.size()) damaged("it has names without an entry");
  check_ranges();
}

void Index::check_entry(std::uint32_t i, std::uint64_t next_child, std::uint64_t next_name) const {
  const Entry& entry = entries_[i];
  const auto wrong = [&](const std::string& what) {
    damaged("entry " + std::to_string(i) + " " + what);
  };
  if (const std::string fault = fault_of(entry); !fault.empty()) wrong(fault);
  if (entry.kind == EntryKind::kDirectory && entry.offset != next_child) {
    wrong("has children out of order");
  }
  if (entry.kind == EntryKind::kFile) {
    const std::uint64_t size = partition_size(entry.partition);
    if (entry.offset > size || entry.stored_size > size - entry.offset) {
      wrong("is outside of its partition");
    }
  }
  if (entry.name_offset != next_name) wrong("has a name out of order");
  const std::string_view name = this->name(i);
  if (i == 0) return;
  if (i >= next_child) wrong("is in no directory");
  if (!is_possible_name(name)) wrong("has an impossible name");
  const bool sibling = i > 1 && entries_[i - 1].parent == entry.parent;
  if (sibling && !(this->name(i - 1) < name)) wrong("has a name out of order");
}

void Index::check_ranges() const {
  using Stored = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>;  // partition, begin, end
  std::vector<Stored> ranges;
  for (const Entry& entry : entries_) {
    if (entry.kind != EntryKind::kFile || entry.stored_size == 0) continue;
    ranges.emplace_back(entry.partition, entry.offset, entry.offset + entry.stored_size);
  }
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    const auto& [partition, begin, end] = ranges[i];
    if (partition == std::get<0>(ranges[i - 1]) && begin < std::get<2>(ranges[i - 1])) {
      damaged("files overlap in " + partition_name(partition));
    }
  }
}

}  // namespace pydist::packs
