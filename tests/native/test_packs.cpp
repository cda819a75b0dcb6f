// Packs: what was written is found and read, and damage is refused with a reason.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <set>
#include <thread>

#include "io/crc32c.hpp"
#include "packs/codec.hpp"
#include "packs_files.hpp"

namespace pydist::packs {
namespace {

// Expects a PackError that has `part` in its text.
template <class Call>
void expect_refused(Call&& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << part;
  } catch (const PackError& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

class Packs : public testing::TestWithParam<Codec> {
 protected:
  void SetUp() override { write_sample(folder_, GetParam()); }
  TemporaryFolder folder_;
};

TEST_P(Packs, EveryFileIsFoundAndRead) {
  const Folder folder(folder_.path());
  folder.index().check();
  for (const auto& [path, bytes] : sample_files()) {
    const auto entry = folder.index().find(path);
    ASSERT_TRUE(entry) << path;
    EXPECT_EQ(folder.index().path(*entry), path);
    EXPECT_EQ(folder.index().entry(*entry).raw_size, bytes.size());
    EXPECT_EQ(folder.index().entry(*entry).mode, 0644);
    EXPECT_EQ(folder.index().entry(*entry).mtime_ns, 1'000'000'007);
    EXPECT_EQ(content_of(folder, *entry), bytes);
    folder.check(*entry);
  }
}

TEST_P(Packs, OnlySmallerFilesAreCompressed) {
  const Folder folder(folder_.path());
  for (const auto& [path, bytes] : sample_files()) {
    const Entry& entry = folder.index().entry(folder.index().find(path).value());
    EXPECT_EQ(entry.codec, bytes.size() > 100 ? GetParam() : entry.codec) << path;
    EXPECT_EQ(entry.codec == Codec::kRaw, entry.stored_size == entry.raw_size);
    EXPECT_EQ(entry.offset % kAlignment, 0u);
  }
}

TEST_P(Packs, ManyThreadsReadAtOnce) {
  const Folder folder(folder_.path());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (const auto& [path, bytes] : sample_files()) {
        wrong += content_of(folder, folder.index().find(path).value()) != bytes;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// Every byte of a partition that belongs to a file or to the header is protected.
TEST_P(Packs, AChangedByteOfAPartitionIsFound) {
  std::set<std::pair<std::uint32_t, std::uint64_t>> covered;
  {
    const Folder folder(folder_.path());
    for (const auto& [path, bytes] : sample_files()) {
      const Entry& entry = folder.index().entry(folder.index().find(path).value());
      for (std::uint64_t i = 0; i < entry.stored_size; i += 7) {
        covered.emplace(entry.partition, entry.offset + i);
      }
    }
  }
  for (std::uint64_t i = 0; i < sizeof(PartitionHeader); ++i) covered.emplace(1, i);
  for (const auto& [partition, at] : covered) {
    const std::string file = folder_ / partition_name(partition);
    const std::string good = read_file(file);
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    write_file(file, bad);
    const Folder folder(folder_.path());
    int refused = 0;
    for (const auto& [path, bytes] : sample_files()) {
      try {
        folder.check(folder.index().find(path).value());
      } catch (const PackError&) {
        ++refused;
      }
    }
    EXPECT_GE(refused, 1) << file << " byte " << at;
    write_file(file, good);
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, Packs, testing::Values(Codec::kRaw, Codec::kZstd, Codec::kLz4),
                         [](const auto& tested) { return name_of(tested.param); });

TEST(PackIndex, ListsDirectories) {
  const TemporaryFolder folder;
  write_sample(folder);
  const Index index = Index::open(folder / kIndexName);
  const auto names = [&index](std::string_view path) {
    const auto [first, count] = index.children(index.find(path).value());
    std::vector<std::string> found;
    for (std::uint32_t i = 0; i < count; ++i) found.emplace_back(index.name(first + i));
    return found;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(""), (Names{"a.txt", "empty", "train", "void"}));
  EXPECT_EQ(names("train"), (Names{"cats", "dogs"}));
  EXPECT_EQ(names("void"), Names{});
  std::vector<std::string> files;
  for (const std::uint32_t file : index.files(0)) files.push_back(index.path(file));
  std::vector<std::string> expected;
  for (const auto& [path, bytes] : sample_files()) expected.push_back(path);
  EXPECT_EQ(files, expected);
  EXPECT_EQ(index.origin(), R"({"seed": 0})");
  EXPECT_EQ(index.id(), test_id());
  expect_refused([&] { index.children(index.find("a.txt").value()); }, "not a directory");
}

TEST(PackIndex, FindsNothingElse) {
  const TemporaryFolder folder;
  write_sample(folder);
  const Index index = Index::open(folder / kIndexName);
  EXPECT_EQ(index.find(""), 0u);
  for (const char* path :
       {"b", "train/", "/train", "train//cats", "a.txt/b", "a.txt/", ".", "..", "train/..", "/"}) {
    EXPECT_FALSE(index.find(path)) << path;
  }
  EXPECT_FALSE(index.find(std::string_view("a.txt\0", 6)));
}

// Otherwise extracting a pack of a stranger could write anywhere.
TEST(PackIndex, NamesThatLeadElsewhereAreNeverReturned) {
  for (const char* name : {"..", ".", "a/b", "/etc", ""}) {
    IndexWriter writer(0755, 0);
    writer.add(0, name, EntryKind::kFile, 0644, 0);
    const std::vector<std::byte> bytes = writer.bytes(test_id(), {sizeof(PartitionHeader)}, "");
    const Index index = Index::view("hostile", bytes);
    expect_refused([&] { index.check(); }, "impossible name");
    expect_refused([&] { index.children(0); }, "impossible name");
    expect_refused([&] { index.path(1); }, "impossible parents");
  }
}

TEST(PackIndex, EveryChangedByteIsRefused) {
  const TemporaryFolder folder;
  write_sample(folder);
  const std::string good = read_file(folder / kIndexName);
  for (std::size_t at = 0; at < good.size(); ++at) {
    std::vector<std::byte> bad = bytes_of(good);
    bad[at] ^= std::byte{1};
    EXPECT_THROW(Index::view("bad", bad).check(), PackError) << at;
  }
  for (std::size_t size = 0; size < good.size(); ++size) {
    const std::vector<std::byte> cut = bytes_of(good.substr(0, size));
    EXPECT_THROW(Index::view("cut", cut), PackError) << size;
  }
  for (const std::string& bad : {std::string(), good.substr(0, 100), good + "x"}) {
    write_file(folder / "bad", bad);
    EXPECT_THROW(Index::open(folder / "bad"), PackError);
  }
}

TEST(PackFolder, ReadsParts) {
  const TemporaryFolder folder;
  write_sample(folder);
  const Folder pack(folder.path());
  const std::uint32_t entry = pack.index().find("train/cats/2.jpg").value();
  std::vector<std::byte> out(10);
  EXPECT_EQ(pack.pread(entry, 195, out), 6u);
  EXPECT_EQ(text_of(out).substr(0, 6), "yyyyyz");
  EXPECT_EQ(pack.pread(entry, 201, out), 0u);
  EXPECT_EQ(pack.pread(entry, ~std::uint64_t{0}, out), 0u);
  expect_refused([&] { pack.read(entry, out); }, "it has 201 bytes");
  expect_refused([&] { pack.pread(0, 0, out); }, "a directory");
}

// A pack with one raw file that is large enough to be copied from a map of its partition.
void write_large(const TemporaryFolder& folder, const std::string& bytes) {
  IndexWriter index(0755, 1);
  PartitionWriter partition(folder / partition_name(0), 0, test_id());
  write_file(folder / "source", bytes);
  const Descriptor source(::open((folder / "source").c_str(), O_RDONLY));
  const std::uint32_t entry = index.add(0, "large", EntryKind::kFile, 0644, 1);
  index.store(entry, partition.append(source.get(), bytes.size(), Codec::kRaw));
  const std::vector<std::uint64_t> sizes = {partition.finish()};
  write_file(folder / kIndexName, text_of(index.bytes(test_id(), sizes, "{}")));
}

std::string large_content() {
  std::string bytes(kMappedFile + 777, 0);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * i + i / 251);
  return bytes;
}

TEST(PackFolder, LargeFilesAreReadWhole) {
  const TemporaryFolder folder;
  const std::string bytes = large_content();
  write_large(folder, bytes);
  const Folder pack(folder.path());
  for (int time = 0; time < 2; ++time) EXPECT_EQ(content_of(pack, 1), bytes);
}

TEST(PackFolder, FindsAChangedByteOfALargeFile) {
  const TemporaryFolder folder;
  write_large(folder, large_content());
  const std::string partition = folder / partition_name(0);
  std::string stored = read_file(partition);
  stored[stored.size() - 5] ^= 1;
  write_file(partition, stored);
  const Folder pack(folder.path());
  std::vector<std::byte> out(pack.file(1).raw_size);
  EXPECT_THROW(pack.read(1, out), PackError);
}

TEST(PackFolder, ALargeFileThatIsCutShortIsAnError) {
  const TemporaryFolder folder;
  const std::string bytes = large_content();
  write_large(folder, bytes);
  const Folder pack(folder.path());
  std::vector<std::byte> out(pack.file(1).raw_size);
  pack.read(1, out);  // which maps it
  std::filesystem::resize_file(folder / partition_name(0), kMappedFile / 2);
  EXPECT_THROW(pack.read(1, out), PackError);
}

TEST(PackFolder, RefusesPartitionsOfAnotherPack) {
  const TemporaryFolder folder, other;
  write_sample(folder);
  write_sample(other, Codec::kRaw, test_id(8));
  const auto copy = [&](const char* from, const std::string& to) {
    std::filesystem::copy_file(from, to, std::filesystem::copy_options::overwrite_existing);
  };
  copy((other / partition_name(0)).c_str(), folder / partition_name(0));
  expect_refused([&] { Folder(folder.path()).partition_fd(0); }, "belongs to another pack");
  copy((folder / partition_name(1)).c_str(), folder / partition_name(0));
  expect_refused([&] { Folder(folder.path()).partition_fd(0); }, "belongs to another pack");
  std::filesystem::resize_file(folder / partition_name(1), 100);
  expect_refused([&] { Folder(folder.path()).partition_fd(1); }, "it has 100 bytes of");
  std::filesystem::remove(folder / partition_name(1));
  expect_refused([&] { Folder(folder.path()).partition_fd(1); }, "No such file");
  expect_refused([&] { Folder(folder.path()).partition_fd(2); }, "partition 2 of 2");
  expect_refused([&] { Folder(folder / "none"); }, "No such file");
}

TEST(PackWriter, APartitionThatWasNotFinishedIsNone) {
  const TemporaryFolder folder;
  write_sample(folder);
  std::filesystem::remove(folder / partition_name(1));
  {
    PartitionWriter unfinished(folder / partition_name(1), 1, test_id());
    write_file(folder / "source", std::string(6000, 'a'));
    const Descriptor source(::open((folder / "source").c_str(), O_RDONLY));
    unfinished.append(source.get(), 6000, Codec::kRaw);
  }
  expect_refused([&] { Folder(folder.path()).partition_fd(1); }, "not a partition");
  EXPECT_THROW(PartitionWriter(folder / partition_name(1), 1, test_id()), WriteError);
}

TEST(PackWriter, ReadsWhatWasAppended) {
  const TemporaryFolder folder;
  PartitionWriter partition(folder / partition_name(0), 0, test_id());
  const std::vector<std::string> texts = {std::string(5000, 'a'), "b", "", "cde"};
  for (const Codec codec : {Codec::kRaw, Codec::kZstd, Codec::kLz4}) {
    std::vector<Stored> stored;
    for (const std::string& text : texts) stored.push_back(partition.append(bytes_of(text), codec));
    EXPECT_EQ(stored[0].codec, codec);
    EXPECT_EQ(stored[1].codec, Codec::kRaw) << "compression would make it larger";
    for (const bool finished : {false, true}) {
      if (finished) partition.finish();
      for (std::size_t i = 0; i < texts.size(); ++i) {
        std::vector<std::byte> out(texts[i].size());
        partition.read(stored[i], out);
        EXPECT_EQ(text_of(out), texts[i]);
      }
    }
    std::vector<std::byte> other(7);
    expect_refused([&] { partition.read(stored[0], other); }, "a file of 5000 bytes");
  }
}

TEST(PackWriter, FindsDamageInWhatWasAppended) {
  const TemporaryFolder folder;
  PartitionWriter partition(folder / partition_name(0), 0, test_id());
  std::vector<std::byte> out(500);
  for (const Codec codec : {Codec::kRaw, Codec::kZstd}) {
    const Stored stored = partition.append(bytes_of(std::string(500, 'a')), codec);
    std::fstream file(folder / partition_name(0), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<long>(stored.offset));
    file.put('#').flush();
    expect_refused([&] { partition.read(stored, out); }, "damaged");
    std::filesystem::resize_file(folder / partition_name(0), stored.offset);
    expect_refused([&] { partition.read(stored, out); }, "cut short");
  }
}

TEST(PackWriter, RefusesFilesThatChange) {
  const TemporaryFolder folder;
  PartitionWriter partition(folder / partition_name(0), 0, test_id());
  write_file(folder / "source", std::string(500, 'a'));
  const Descriptor source(::open((folder / "source").c_str(), O_RDONLY));
  for (const Codec codec : {Codec::kRaw, Codec::kZstd}) {
    expect_refused([&] { partition.append(source.get(), 499, codec); }, "changed");
    expect_refused([&] { partition.append(source.get(), 501, codec); }, "changed");
  }
}

TEST(PackWriter, RefusesAnotherOrder) {
  IndexWriter index(0755, 0);
  const auto b = index.add(0, "b", EntryKind::kDirectory, 0755, 0);
  expect_refused([&] { index.add(0, "b", EntryKind::kFile, 0644, 0); }, "order");
  expect_refused([&] { index.add(0, "a", EntryKind::kFile, 0644, 0); }, "order");
  const auto file = index.add(b, "file", EntryKind::kFile, 0644, 0);
  expect_refused([&] { index.add(0, "c", EntryKind::kFile, 0644, 0); }, "order");
  expect_refused([&] { index.add(file, "c", EntryKind::kFile, 0644, 0); }, "order");
  expect_refused([&] { index.add(17, "c", EntryKind::kFile, 0644, 0); }, "order");
}

TEST(PackCodec, LimitsWhatIsDecompressed) {
  const std::vector<std::byte> raw(1 << 20);
  for (const Codec codec : {Codec::kZstd, Codec::kLz4, Codec::kBlosc}) {
    if (!is_installed(codec)) continue;
    const std::vector<std::byte> stored = compress(codec, raw);
    std::vector<std::byte> out(raw.size());
    decompress(codec, stored, out);
    EXPECT_EQ(out, raw);
    for (const std::size_t size : {raw.size() - 1, raw.size() + 1, std::size_t{0}}) {
      out.resize(size);
      EXPECT_THROW(decompress(codec, stored, out), PackError) << size;
    }
    Entry entry{};
    entry.codec = codec;
    entry.stored_size = stored.size();
    entry.raw_size = raw.size();
    EXPECT_EQ(fault_of_sizes(entry), "");
    entry.stored_size = 16;  // of a bomb
    EXPECT_NE(fault_of_sizes(entry), "");
  }
}

// Small counts of two bytes: most bits are 0, and blosc brings them together.
TEST(PackCodec, BloscSortsTheBitsOfValues) {
  if (!is_installed(Codec::kBlosc)) GTEST_SKIP() << "no blosc library";
  std::vector<std::byte> raw(1 << 18);
  std::uint32_t state = 1;
  for (std::size_t i = 0; i < raw.size(); i += 2) {
    state = state * 1664525u + 1013904223u;
    raw[i] = static_cast<std::byte>(state >> 29 & state >> 26 & 7u);
  }
  const auto counts = compress({Codec::kBlosc, 2}, raw);
  EXPECT_LT(counts.size(), compress(Codec::kBlosc, raw).size());
  EXPECT_LT(counts.size(), compress(Codec::kZstd, raw).size());
  std::vector<std::byte> out(raw.size());
  decompress(Codec::kBlosc, counts, out);
  EXPECT_EQ(out, raw);
  // Also where it is not that of the values.
  for (const auto item_size : std::to_array<std::uint8_t>({1, 3, 7, 255})) {
    decompress(Codec::kBlosc, compress({Codec::kBlosc, item_size}, raw), out);
    EXPECT_EQ(out, raw) << int{item_size};
  }
}

}  // namespace
}  // namespace pydist::packs
