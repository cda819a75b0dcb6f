// The index of a pack: opening, look-ups and listings at 100,000 files in 1,000 folders.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "packs/index.hpp"
#include "packs/writer.hpp"

namespace pydist::packs {
namespace {

constexpr std::uint32_t kFolders = 1'000, kFiles = 100;  // as ImageNet, with a tenth of its files

std::string name_of(const char* format, std::uint32_t number) {
  char text[32];
  std::snprintf(text, sizeof(text), format, number);
  return text;
}

const std::vector<std::byte>& sample_index() {
  static const std::vector<std::byte> bytes = [] {
    IndexWriter index(0755, 0);
    for (std::uint32_t folder = 0; folder < kFolders; ++folder) {
      index.add(0, name_of("n%08u", folder), EntryKind::kDirectory, 0755, 0);
    }
    for (std::uint32_t folder = 0; folder < kFolders; ++folder) {
      for (std::uint32_t file = 0; file < kFiles; ++file) {
        index.add(1 + folder, name_of("n_%08u.JPEG", file), EntryKind::kFile, 0644, 0);
      }
    }
    return index.bytes({}, {sizeof(PartitionHeader)}, "{}");
  }();
  return bytes;
}

std::vector<std::string> sample_paths() {
  std::vector<std::string> paths;
  std::minstd_rand random(7);
  for (int i = 0; i < 4096; ++i) {
    const auto folder = static_cast<std::uint32_t>(random() % kFolders);
    const auto file = static_cast<std::uint32_t>(random() % kFiles);
    paths.push_back(name_of("n%08u", folder) + "/" + name_of("n_%08u.JPEG", file));
  }
  return paths;
}

void bench_find(benchmark::State& state) {
  const Index index = Index::view("benchmark", sample_index());
  const std::vector<std::string> paths = sample_paths();
  for (const std::string& path : paths) {
    const auto found = index.find(path);
    if (!found || index.path(*found) != path) return state.SkipWithError("find is wrong");
  }
  if (index.find(paths[0] + "x")) return state.SkipWithError("find finds what is not there");
  std::size_t next = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(index.find(paths[next]));
    next = (next + 1) % paths.size();
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(bench_find)->Name("packs/find");

void bench_list(benchmark::State& state) {
  const Index index = Index::view("benchmark", sample_index());
  std::uint32_t folder = 0;
  for (auto _ : state) {
    const auto [first, count] = index.children(1 + folder);
    if (count != kFiles) return state.SkipWithError("a listing is wrong");
    for (std::uint32_t i = 0; i < count; ++i) benchmark::DoNotOptimize(index.name(first + i));
    folder = (folder + 1) % kFolders;
  }
  state.SetItemsProcessed(state.iterations() * kFiles);
}
BENCHMARK(bench_list)->Name("packs/list");

void bench_open(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(Index::view("benchmark", sample_index()).size());
}
BENCHMARK(bench_open)->Name("packs/open");

void bench_check(benchmark::State& state) {
  const Index index = Index::view("benchmark", sample_index());
  for (auto _ : state) index.check();
  state.SetItemsProcessed(state.iterations() * index.size());
}
BENCHMARK(bench_check)->Name("packs/check");

}  // namespace
}  // namespace pydist::packs
