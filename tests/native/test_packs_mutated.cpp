// Packs from anywhere: mutated indexes are refused, or answer without touching foreign memory.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "io/crc32c.hpp"
#include "packs_files.hpp"

namespace pydist::packs {
namespace {

using Random = std::minstd_rand;

std::uint64_t any_of(Random& random, std::initializer_list<std::uint64_t> values) {
  return values.begin()[random() % values.size()];
}

// A number that a careless check would let pass.
std::uint64_t hostile(Random& random, std::uint64_t size) {
  return any_of(random, {0, 1, 2, 63, 64, 128, size - 1, size, size + 1, 0x7FFFFFFF, 0xFFFFFFFF,
                         0x100000000, ~std::uint64_t{0}, ~std::uint64_t{0} - 63,
                         std::uint64_t{1} << 63, random() % (size + 1)});
}

// Changes a few words or bytes from byte `first` on.
void mutate(std::string& bytes, std::size_t first, Random& random) {
  const int changes = 1 + static_cast<int>(random() % 3);
  for (int i = 0; i < changes; ++i) {
    const std::size_t at = first + random() % (bytes.size() - first);
    if (random() % 2 == 0 || at / 8 * 8 < first || at / 8 * 8 + 8 > bytes.size()) {
      bytes[at] = static_cast<char>(random());
    } else {
      const std::uint64_t word = hostile(random, bytes.size());
      const std::size_t size = random() % 2 == 0 ? 4 : 8;
      std::memcpy(bytes.data() + at / size * size, &word, size);
    }
  }
}

// Makes both checksums right, as an attacker would.
void seal(std::string& bytes) {
  IndexHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  header.body_crc = io::crc32c(bytes.data() + sizeof(header), bytes.size() - sizeof(header));
  header.crc = io::crc32c(&header, offsetof(IndexHeader, crc));
  std::memcpy(bytes.data(), &header, sizeof(header));
}

// Uses everything that an index offers. Returns whether it passes its check.
bool use(const std::vector<std::byte>& bytes, std::size_t& walked) {
  std::optional<Index> index;
  try {
    index.emplace(Index::view("mutant", bytes));
  } catch (const PackError&) {
    return false;
  }
  const auto quietly = [](auto&& call) {
    try {
      call();
    } catch (const PackError&) {
    }
  };
  for (std::uint32_t i = 0; i < index->size() + 2; ++i) {
    quietly([&] { EXPECT_LE(index->name(i).size(), bytes.size()); });
    quietly([&] { index->find(index->path(i)); });
    quietly([&] { index->children(i); });
    quietly([&] { index->child(i, "1.jpg"); });
  }
  for (const auto& [path, bytes] : sample_files()) quietly([&] { index->find(path); });
  quietly([&] { EXPECT_LE(index->files(0).size(), index->size()); });
  // A walk ends: no entry is reached twice.
  std::vector<std::uint32_t> open = {0};
  std::size_t reached = 0;
  while (!open.empty()) {
    const std::uint32_t at = open.back();
    open.pop_back();
    EXPECT_LE(++reached, index->size());
    quietly([&] {
      const auto [first, count] = index->children(at);
      for (std::uint32_t i = 0; i < count; ++i) {
        EXPECT_TRUE(is_possible_name(index->name(first + i)));
        open.push_back(first + i);
      }
    });
  }
  walked += reached;
  try {
    index->check();
    return true;
  } catch (const PackError&) {
    return false;
  }
}

std::size_t mutations(bool header, int count) {
  const TemporaryFolder folder;
  write_sample(folder);
  const std::string good = read_file(folder / kIndexName);
  Random random(header ? 1 : 2);
  std::size_t walked = 0, whole = 0;
  for (int i = 0; i < count; ++i) {
    std::string bad = good;
    mutate(bad, header ? 0 : sizeof(IndexHeader), random);
    seal(bad);
    if (random() % 16 == 0) bad.resize(random() % (bad.size() + 64));
    whole += use(bytes_of(bad), walked);  // on the heap, where sanitizers see each byte beyond
  }
  EXPECT_GT(walked, static_cast<std::size_t>(count) / 4);  // the mutants get past the header
  // Harmless ones: of a mode, a time, a letter or the origin.
  EXPECT_LT(whole, static_cast<std::size_t>(count) / 2);
  return whole;
}

TEST(MutatedPacks, HeadersOfAnIndexAreRefusedOrHarmless) { mutations(true, 50'000); }

TEST(MutatedPacks, TablesOfAnIndexAreRefusedOrHarmless) { EXPECT_GT(mutations(false, 60'000), 0u); }

// Reads all files of a pack whose index passes no check.
TEST(MutatedPacks, FilesAreReadOrRefused) {
  const TemporaryFolder folder;
  write_sample(folder, Codec::kLz4);
  const std::string good = read_file(folder / kIndexName);
  Random random(3);
  std::size_t read = 0;
  for (int i = 0; i < 2'000; ++i) {
    std::string bad = good;
    mutate(bad, sizeof(IndexHeader), random);
    seal(bad);
    write_file(folder / kIndexName, bad);
    const Folder pack(folder.path());
    for (std::uint32_t entry = 0; entry < pack.index().size(); ++entry) {
      try {
        // A compressed file may declare more than it has, up to what its codec can achieve.
        EXPECT_LE(pack.file(entry).raw_size, 255u * 4096);
        content_of(pack, entry);
        ++read;
      } catch (const PackError&) {
      } catch (const comm::LibraryMissing&) {  // of another codec
      }
    }
  }
  EXPECT_GT(read, 2'000u);
}

TEST(MutatedPacks, PartitionsAreReadOrRefused) {
  const TemporaryFolder folder;
  write_sample(folder, Codec::kZstd);
  const std::string good = read_file(folder / partition_name(0));
  Random random(4);
  std::size_t refused = 0;
  for (int i = 0; i < 2'000; ++i) {
    std::string bad = good;
    mutate(bad, 0, random);
    write_file(folder / partition_name(0), bad);
    const Folder pack(folder.path());
    for (const auto& [path, bytes] : sample_files()) {
      try {
        EXPECT_EQ(content_of(pack, pack.index().find(path).value()), bytes);
      } catch (const PackError&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 1'000u);
}

// Chunks whose checksums are right, so that nothing but the codec stands before the library.
TEST(MutatedPacks, ChunksOfBloscAreDecompressedOrRefused) {
  if (!is_installed(Codec::kBlosc)) GTEST_SKIP() << "no blosc library";
  std::vector<std::byte> raw(5000);
  for (std::size_t i = 0; i < raw.size(); ++i) raw[i] = static_cast<std::byte>(i * i % 7);
  const std::vector<std::byte> chunk = compress({Codec::kBlosc, 2}, raw);
  const std::string good(reinterpret_cast<const char*>(chunk.data()), chunk.size());
  Random random(5);
  std::size_t refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string bad = good;
    mutate(bad, 0, random);
    if (random() % 16 == 0) bad.resize(random() % bad.size());
    const std::vector<std::byte> stored = bytes_of(bad);
    std::vector<std::byte> out(raw.size());
    try {
      decompress(Codec::kBlosc, stored, out);
    } catch (const PackError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1'000u);
}

}  // namespace
}  // namespace pydist::packs
