// The server of a pack's partitions: whole files by one connection, checksums included, over the
// two kinds of sockets.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "packs/folder.hpp"
#include "packs/server.hpp"
#include "packs/writer.hpp"

namespace pydist::packs {
namespace {

constexpr std::uint32_t kFiles = 64;
constexpr Secret kSecret{std::byte{1}};
constexpr PackId kId{std::byte{1}};

// A pack of files of one size in a folder, and its index alone in another, with a server of the
// first one that readers of the second one ask.
class ServedPack {
 public:
  ServedPack(std::size_t size, bool unix_socket) {
    std::string name = (std::filesystem::temp_directory_path() / "pydist-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw PackError(name + ": can't be made");
    root_ = name;
    for (const char* folder : {"/all", "/index"}) std::filesystem::create_directory(name + folder);
    write(size);
    std::filesystem::copy_file(name + "/all/" + kIndexName, name + "/index/" + kIndexName);
    server_ = std::make_unique<Server>(std::make_shared<Folder>(name + "/all"),
                                       unix_socket ? name + "/socket" : "127.0.0.1:0", kSecret, 1);
    folder_ = std::make_unique<Folder>(name + "/index", std::vector{server_->address()}, kSecret);
  }
  ~ServedPack() {
    folder_.reset();
    server_.reset();
    std::filesystem::remove_all(root_);
  }
  ServedPack(const ServedPack&) = delete;
  ServedPack& operator=(const ServedPack&) = delete;

  const Folder& folder() const { return *folder_; }
  std::uint64_t requests() const { return server_->requests(); }

 private:
  void write(std::size_t size) const {
    const std::string folder = root_.string() + "/all/";
    PartitionWriter partition(folder + partition_name(0), 0, kId);
    IndexWriter index(0755, 0);
    for (std::uint32_t i = 0; i < kFiles; ++i) {
      const std::vector<std::byte> bytes(size, static_cast<std::byte>(i));
      const std::string name = {static_cast<char>('0' + i / 10), static_cast<char>('0' + i % 10)};
      index.store(index.add(0, name, EntryKind::kFile, 0644, 0),
                  partition.append(bytes, {Codec::kRaw, 1}));
    }
    const std::vector<std::byte> made = index.bytes(kId, {partition.finish()}, "{}");
    std::ofstream(folder + kIndexName, std::ios::binary)
        .write(reinterpret_cast<const char*>(made.data()), static_cast<long>(made.size()));
  }

  std::filesystem::path root_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Folder> folder_;
};

void bench_served(benchmark::State& state, bool unix_socket) {
  const auto size = static_cast<std::size_t>(state.range(0));
  const ServedPack pack(size, unix_socket);
  std::vector<std::byte> bytes(size);
  for (std::uint32_t i = 0; i < kFiles; ++i) {
    pack.folder().read(1 + i, bytes);
    if (bytes.back() != static_cast<std::byte>(i)) return state.SkipWithError("a read is wrong");
  }
  if (pack.requests() != kFiles) return state.SkipWithError("a read is more than one request");
  std::uint32_t next = 0;
  for (auto _ : state) {
    pack.folder().read(1 + next, bytes);
    next = (next + 1) % kFiles;
  }
  state.SetItemsProcessed(state.iterations());
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(size));
}
// By the clock: a server's thread works as well.
BENCHMARK_CAPTURE(bench_served, unix, true)
    ->Name("packs/served/unix")
    ->Arg(4 << 10)
    ->Arg(128 << 10)
    ->Arg(2 << 20)
    ->UseRealTime();
BENCHMARK_CAPTURE(bench_served, tcp, false)
    ->Name("packs/served/tcp")
    ->Arg(4 << 10)
    ->Arg(128 << 10)
    ->Arg(2 << 20)
    ->UseRealTime();

}  // namespace
}  // namespace pydist::packs
