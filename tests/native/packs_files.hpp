// Packs on disk for tests: a temporary folder, and a pack with a few files in it.
#pragma once

#include <fcntl.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "comm/driver/dynamic_library.hpp"
#include "packs/codec.hpp"
#include "packs/folder.hpp"
#include "packs/writer.hpp"

namespace pydist::packs {

// A folder that its destructor removes.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "pydist-XXXXXX").string();
    if (::mkdtemp(name.data()) != nullptr) path_ = name;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Whether the library of a codec can be opened.
inline bool is_installed(Codec codec) {
  try {
    require(codec);
    return true;
  } catch (const comm::LibraryMissing&) {
    return false;
  }
}

inline void write_file(const std::string& file, std::string_view bytes) {
  std::ofstream(file, std::ios::binary).write(bytes.data(), static_cast<long>(bytes.size()));
}

inline std::string read_file(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

inline PackId test_id(int seed = 7) {
  PackId id;
  for (std::size_t i = 0; i < id.size(); ++i) id[i] = static_cast<std::byte>(seed + 3 * i);
  return id;
}

inline std::vector<std::byte> bytes_of(std::string_view text) {
  const auto* start = reinterpret_cast<const std::byte*>(text.data());
  return {start, start + text.size()};
}

inline std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline std::string content_of(const Folder& folder, std::uint32_t entry) {
  std::vector<std::byte> bytes(folder.file(entry).raw_size);
  folder.read(entry, bytes);
  return text_of(bytes);
}

// The files of the sample pack, by path. Repeating ones are compressible.
inline const std::map<std::string, std::string>& sample_files() {
  static const std::map<std::string, std::string> files = {
      {"a.txt", "first"},
      {"empty", ""},
      {"train/cats/1.jpg", std::string(5000, 'x')},
      {"train/cats/2.jpg", std::string(200, 'y').append("z")},
      {"train/dogs/\xff\xfe.jpg", std::string(64, 'd')},
  };
  return files;
}

// Writes the sample pack: two partitions, and the directories train, train/cats, train/dogs, void.
inline void write_sample(const TemporaryFolder& folder, Codec codec = Codec::kRaw,
                         const PackId& id = test_id()) {
  IndexWriter index(0755, 1);
  PartitionWriter first(folder / partition_name(0), 0, id);
  PartitionWriter second(folder / partition_name(1), 1, id);
  const auto file = [&](std::uint32_t parent, std::string_view name, const std::string& path) {
    const std::string& bytes = sample_files().at(path);
    write_file(folder / "source", bytes);
    const Descriptor source(::open((folder / "source").c_str(), O_RDONLY));
    const std::uint32_t entry = index.add(parent, name, EntryKind::kFile, 0644, 1'000'000'007);
    PartitionWriter& partition = entry % 2 == 0 ? first : second;
    index.store(entry, partition.append(source.get(), bytes.size(), codec));
  };
  file(0, "a.txt", "a.txt");
  file(0, "empty", "empty");
  const auto train = index.add(0, "train", EntryKind::kDirectory, 0755, 2);
  index.add(0, "void", EntryKind::kDirectory, 0700, 3);
  const auto cats = index.add(train, "cats", EntryKind::kDirectory, 0755, 4);
  const auto dogs = index.add(train, "dogs", EntryKind::kDirectory, 0755, 5);
  file(cats, "1.jpg", "train/cats/1.jpg");
  file(cats, "2.jpg", "train/cats/2.jpg");
  file(dogs, "\xff\xfe.jpg", "train/dogs/\xff\xfe.jpg");
  const std::vector<std::uint64_t> sizes = {first.finish(), second.finish()};
  write_file(folder / kIndexName, text_of(index.bytes(id, sizes, R"({"seed": 0})")));
  std::filesystem::remove(folder / "source");
}

}  // namespace pydist::packs
