// Packs for Python: reading a folder, and writing partitions and an index. Paths and names are
// bytes.
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/tensor_border.hpp"
#include "core/errors.hpp"
#include "packs/codec.hpp"
#include "packs/folder.hpp"
#include "packs/server.hpp"
#include "packs/writer.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;
using packs::Codec;
using packs::Entry;
using packs::EntryKind;
using packs::Folder;
using packs::IndexWriter;
using packs::PackId;
using packs::PartitionWriter;
using packs::Stored;

// Sets an error whose text may have any bytes of a file's name: as one line.
void raise_line(const char* type, const std::string& text) {
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    constexpr const char* kDigits = "0123456789abcdef";
    const bool control = byte < 0x20 || byte == 0x7F;
    line +=
        control ? std::string("\\x") + kDigits[byte / 16] + kDigits[byte % 16] : std::string(1, c);
  }
  const auto message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(line.data(), static_cast<Py_ssize_t>(line.size()), "backslashreplace"));
  if (message) PyErr_SetObject(error_type(type).ptr(), message.ptr());
}

void translate_pack_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const packs::PackError& fault) {
    raise_line("DataError", fault.what());
  } catch (const packs::WriteError& fault) {
    raise_line("DiskError", fault.what());
  }
}

Codec codec_of(const std::string& name) {
  for (const Codec codec : {Codec::kRaw, Codec::kZstd, Codec::kLz4, Codec::kBlosc}) {
    if (name == packs::name_of(codec)) return codec;
  }
  throw UsageError("codec " + name + ": choose raw, zstd, lz4 or blosc");
}

packs::Compression compression(const std::string& codec, int item_size) {
  if (item_size < 1 || item_size > 255) {
    throw UsageError("item_size=" + std::to_string(item_size) + ": from 1 to 255 bytes");
  }
  return {codec_of(codec), static_cast<std::uint8_t>(item_size)};
}

PackId pack_id(const std::string& bytes) {
  PackId id;
  PYDIST_EXPECT(bytes.size() == id.size(),
                "a pack's id has 16 bytes; got " + std::to_string(bytes.size()));
  std::memcpy(id.data(), bytes.data(), id.size());
  return id;
}

packs::Secret secret_of(const std::string& bytes) {
  packs::Secret secret;
  PYDIST_EXPECT(bytes.size() == secret.size(),
                "a secret has 16 bytes; got " + std::to_string(bytes.size()));
  std::memcpy(secret.data(), bytes.data(), secret.size());
  return secret;
}

py::bytes bytes_of(const PackId& id) {
  return {reinterpret_cast<const char*>(id.data()), id.size()};
}

// An entry with its name, as a value.
struct PackEntry {
  PackEntry(const packs::Index& index, std::uint32_t i)
      : number(i), fields(index.entry(i)), name(index.name(i)) {}
  std::uint32_t number;
  Entry fields;
  std::string name;
};

std::vector<PackEntry> children_of(const Folder& folder, std::uint32_t directory) {
  const auto [first, count] = folder.index().children(directory);
  std::vector<PackEntry> children;
  children.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) children.emplace_back(folder.index(), first + i);
  return children;
}

// Asks for large pages where fresh memory is large, as NumPy does: to make and clear small ones
// took a third of the time in which files of 8 MB are read from the page cache.
void prefer_large_pages(std::span<std::byte> memory) {
#ifdef MADV_HUGEPAGE
  constexpr std::size_t kLarge = std::size_t{4} << 20;
  if (memory.size() < kLarge) return;
  const auto page = static_cast<std::size_t>(::getpagesize());
  const std::size_t before = page - reinterpret_cast<std::uintptr_t>(memory.data()) % page;
  // Only advice: a kernel without them refuses it.
  ::madvise(memory.data() + before, memory.size() - before, MADV_HUGEPAGE);
#endif
}

py::bytes read_whole(const Folder& folder, std::uint32_t entry) {
  std::uint64_t size = 0;
  {
    const py::gil_scoped_release release;
    size = folder.file(entry).raw_size;  // no more than the partition can hold
  }
  const auto result = py::reinterpret_steal<py::bytes>(
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!result) throw py::error_already_set();
  auto* start = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(result.ptr()));
  const std::span<std::byte> bytes(start, static_cast<std::size_t>(size));
  const py::gil_scoped_release release;
  prefer_large_pages(bytes);
  folder.read(entry, bytes);
  return result;
}

// The bytes of a buffer, which is contiguous in host memory.
std::span<std::byte> host_bytes(const Borrowed& borrowed) {
  require_cpu("buffer", borrowed.view());
  require_contiguous("buffer", borrowed.view());
  return {static_cast<std::byte*>(borrowed->data), static_cast<std::size_t>(borrowed->bytes())};
}

void read_into(const Folder& folder, std::uint32_t entry, py::handle buffer) {
  const Borrowed borrowed = borrow(buffer, "buffer", Access::kWrite);
  const std::span<std::byte> out = host_bytes(borrowed);
  const py::gil_scoped_release release;
  folder.read(entry, out);
}

Stored append_bytes(PartitionWriter& writer, py::handle buffer, const std::string& codec,
                    int item_size) {
  const Borrowed borrowed = borrow(buffer, "buffer", Access::kRead);
  const std::span<const std::byte> bytes = host_bytes(borrowed);
  const py::gil_scoped_release release;
  return writer.append(bytes, compression(codec, item_size));
}

void read_appended(const PartitionWriter& writer, const Stored& stored, py::handle buffer) {
  const Borrowed borrowed = borrow(buffer, "buffer", Access::kWrite);
  const std::span<std::byte> out = host_bytes(borrowed);
  const py::gil_scoped_release release;
  writer.read(stored, out);
}

std::size_t read_part(const Folder& folder, std::uint32_t entry, std::uint64_t offset,
                      py::handle buffer) {
  const Borrowed borrowed = borrow(buffer, "buffer", Access::kWrite);
  const std::span<std::byte> out = host_bytes(borrowed);
  const py::gil_scoped_release release;
  return folder.pread(entry, offset, out);
}

void bind_pack_reading(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Stored>(module, "PackedFile", py::is_final(), "Where a partition has a file.")
      .def_readonly("stored_size", &Stored::stored_size)
      .def_readonly("raw_size", &Stored::raw_size);

  py::class_<PackEntry>(module, "PackEntry", py::is_final(), "A file or a directory of a pack.")
      .def_readonly("number", &PackEntry::number)
      .def_property_readonly("name", [](const PackEntry& entry) { return py::bytes(entry.name); })
      .def_property_readonly(
          "is_directory",
          [](const PackEntry& entry) { return entry.fields.kind == EntryKind::kDirectory; })
      .def_property_readonly(
          "size", [](const PackEntry& entry) { return entry.fields.raw_size; },
          "Bytes of a file; 0 for a directory.")
      .def_property_readonly("mode", [](const PackEntry& entry) { return entry.fields.mode; })
      .def_property_readonly("mtime_ns",
                             [](const PackEntry& entry) { return entry.fields.mtime_ns; })
      .def_property_readonly(
          "codec", [](const PackEntry& entry) { return packs::name_of(entry.fields.codec); })
      .def_property_readonly("partition",
                             [](const PackEntry& entry) { return entry.fields.partition; })
      .def_property_readonly(
          "offset", [](const PackEntry& entry) { return entry.fields.offset; },
          "Of a file in its partition, in bytes.")
      .def_property_readonly(
          "stored_size", [](const PackEntry& entry) { return entry.fields.stored_size; },
          "Bytes of a file in its partition.");

  py::class_<Folder, std::shared_ptr<Folder>>(
      module, "PackFolder", py::is_final(),
      "A pack, open for reading; thread-safe. See csrc/packs/folder.hpp.")
      .def(py::init([](const std::string& path, const std::vector<std::string>& servers,
                       const std::string& secret) {
             return std::make_shared<Folder>(path, servers,
                                             servers.empty() ? packs::Secret{} : secret_of(secret));
           }),
           "path"_a, "servers"_a = std::vector<std::string>(), "secret"_a = py::bytes())
      .def_property_readonly("id", [](const Folder& pack) { return bytes_of(pack.index().id()); })
      .def_property_readonly(
          "origin",
          [](const Folder& pack) { return py::bytes(std::string(pack.index().origin())); },
          "JSON text that says how the pack was made.")
      .def_property_readonly("entries", [](const Folder& pack) { return pack.index().size(); })
      .def_property_readonly("partitions",
                             [](const Folder& pack) { return pack.index().partitions(); })
      .def(
          "find",
          [](const Folder& pack, const std::string& path) { return pack.index().find(path); },
          "path"_a, "The number of the entry at a path relative to the root, which is empty.")
      .def(
          "entry", [](const Folder& pack, std::uint32_t i) { return PackEntry(pack.index(), i); },
          "number"_a)
      .def(
          "path",
          [](const Folder& pack, std::uint32_t i) { return py::bytes(pack.index().path(i)); },
          "number"_a)
      .def("children", &children_of, "directory"_a, "The entries of a directory, by name.")
      .def(
          "files",
          [](const Folder& pack, std::uint32_t directory) { return pack.index().files(directory); },
          "directory"_a, NoGil(), "Numbers of the files below a directory, depth first, by name.")
      .def("read", &read_whole, "number"_a, "Reads a file, and compares it with its checksum.")
      .def("read_into", &read_into, "number"_a, "buffer"_a,
           "Reads a file into a buffer of its size, and compares it with its checksum.")
      .def("stored", &Folder::stored, "number"_a, NoGil(), "Where a partition has a file.")
      .def("read_part", &read_part, "number"_a, "offset"_a, "buffer"_a,
           "Reads a part of a file that is stored raw into a buffer, and returns its size.")
      .def(
          "check_index", [](const Folder& pack) { pack.index().check(); }, NoGil(),
          "Checks all of the index.")
      .def(
          "check_partition",
          [](const Folder& pack, std::uint32_t partition) { pack.partition_fd(partition); },
          "partition"_a, NoGil(), "Checks the header and the size of a partition.")
      .def("is_here", &Folder::is_here, "partition"_a, NoGil(),
           "Whether the folder has a partition, or its reads go to the servers.")
      .def("check_file", &Folder::check, "number"_a, NoGil(), "Checks all checksums of a file.");
}

void bind_pack_writing(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def(
      "require_codec", [](const std::string& codec) { packs::require(codec_of(codec)); }, "codec"_a,
      "Opens the library of a codec: raw (none), zstd, lz4 or blosc.");
  module.def("partition_name", &packs::partition_name, "number"_a,
             "The name of a partition's file.");
  module.attr("PACK_INDEX") = packs::kIndexName;

  py::class_<PartitionWriter>(module, "PartitionWriter", py::is_final(),
                              "Writes one partition. See csrc/packs/writer.hpp.")
      .def(py::init([](const std::string& file, std::uint32_t number, const std::string& id) {
             return std::make_unique<PartitionWriter>(file, number, pack_id(id));
           }),
           "file"_a, "number"_a, "id"_a)
      .def(
          "append",
          [](PartitionWriter& writer, int source, std::uint64_t size, const std::string& codec,
             int item_size) { return writer.append(source, size, compression(codec, item_size)); },
          "source"_a, "size"_a, "codec"_a, "item_size"_a = 1, NoGil(),
          "Appends the content of an open file.")
      .def("append_bytes", &append_bytes, "buffer"_a, "codec"_a, "item_size"_a = 1,
           "Appends the bytes of a buffer.")
      .def("read", &read_appended, "stored"_a, "buffer"_a,
           "Reads what was appended into a buffer, and compares it with its checksum.")
      .def("finish", &PartitionWriter::finish, NoGil(), "Completes the file; returns its size.");

  py::class_<IndexWriter>(module, "IndexWriter", py::is_final(),
                          "Collects the entries of an index. See csrc/packs/writer.hpp.")
      .def(py::init<std::uint16_t, std::int64_t>(), "mode"_a, "mtime_ns"_a)
      .def(
          "add",
          [](IndexWriter& writer, std::uint32_t parent, const std::string& name, bool directory,
             std::uint16_t mode, std::int64_t mtime_ns) {
            const EntryKind kind = directory ? EntryKind::kDirectory : EntryKind::kFile;
            return writer.add(parent, name, kind, mode, mtime_ns);
          },
          "parent"_a, "name"_a, "directory"_a, "mode"_a, "mtime_ns"_a)
      .def("store", &IndexWriter::store, "file"_a, "stored"_a)
      .def(
          "content",
          [](const IndexWriter& writer, const std::string& id,
             const std::vector<std::uint64_t>& partitions, const std::string& origin) {
            const auto made = writer.bytes(pack_id(id), partitions, origin);
            return py::bytes(reinterpret_cast<const char*>(made.data()), made.size());
          },
          "id"_a, "partitions"_a, "origin"_a);
}

void bind_pack_server(py::module_& module) {
  using packs::Server;
  py::class_<Server>(module, "PackServer", py::is_final(),
                     "Serves a pack's partitions to other nodes. See csrc/packs/server.hpp.")
      .def(py::init([](const std::shared_ptr<Folder>& folder, const std::string& address,
                       const std::string& secret, int threads) {
             const packs::Secret key = secret_of(secret);
             const py::gil_scoped_release release;
             return std::make_unique<Server>(folder, address, key, threads);
           }),
           "folder"_a, "address"_a, "secret"_a, "threads"_a)
      .def_property_readonly("address", &Server::address)
      .def_property_readonly("partitions", &Server::partitions, "Number of those that are here.")
      .def_property_readonly("requests", &Server::requests)
      .def_property_readonly("sent_bytes", &Server::bytes);
}

}  // namespace

void bind_packs(py::module_& module) {
  py::register_local_exception_translator(translate_pack_error);
  bind_pack_reading(module);
  bind_pack_writing(module);
  bind_pack_server(module);
}

}  // namespace pydist::bindings
