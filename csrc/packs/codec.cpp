// Entry points of libzstd and liblz4, stable since their versions 1.0, and of C-Blosc since 1.16.
#include "packs/codec.hpp"

#include <atomic>
#include <memory>

#include "comm/driver/dynamic_library.hpp"
#include "core/published.hpp"

namespace pydist::packs {
namespace {

struct Zstd {
  Zstd() {
    const comm::DynamicLibrary library("the zstd library", "", {"libzstd.so.1", "libzstd.1.dylib"});
    library.find("ZSTD_compressBound", bound);
    library.find("ZSTD_compress", compress);
    library.find("ZSTD_decompress", decompress);
    library.find("ZSTD_isError", is_error);
    library.find("ZSTD_getErrorName", error_name);
  }
  std::size_t (*bound)(std::size_t) = nullptr;
  std::size_t (*compress)(void*, std::size_t, const void*, std::size_t, int) = nullptr;
  std::size_t (*decompress)(void*, std::size_t, const void*, std::size_t) = nullptr;
  unsigned (*is_error)(std::size_t) = nullptr;
  const char* (*error_name)(std::size_t) = nullptr;
};

struct Lz4 {
  Lz4() {
    const comm::DynamicLibrary library("the lz4 library", "", {"liblz4.so.1", "liblz4.1.dylib"});
    library.find("LZ4_compressBound", bound);
    library.find("LZ4_compress_default", compress);
    library.find("LZ4_decompress_safe", decompress);
  }
  int (*bound)(int) = nullptr;
  int (*compress)(const char*, char*, int, int) = nullptr;
  int (*decompress)(const char*, char*, int, int) = nullptr;
};

// Of C-Blosc 1, whose functions with a context have no state and no structures: C-Blosc2 passes
// structures by value that grow with its versions, and loads plugins that a chunk asks for.
struct Blosc {
  Blosc() {
    const comm::DynamicLibrary library("the blosc library", "",
                                       {"libblosc.so.1", "libblosc.1.dylib"});
    library.find("blosc_compress_ctx", compress);
    library.find("blosc_decompress_ctx", decompress);
    library.find("blosc_cbuffer_validate", validate);
  }
  int (*compress)(int, int, std::size_t, std::size_t, const void*, void*, std::size_t, const char*,
                  std::size_t, int) = nullptr;
  int (*decompress)(const void*, void*, std::size_t, int) = nullptr;
  int (*validate)(const void*, std::size_t, std::size_t*) = nullptr;
};

std::atomic<const Zstd*> opened_zstd{nullptr};
std::atomic<const Lz4*> opened_lz4{nullptr};
std::atomic<const Blosc*> opened_blosc{nullptr};

// Opened at the first use; an attempt that fails is repeated at the next one.
const Zstd& zstd() {
  return published(opened_zstd, [] { return std::make_unique<Zstd>(); });
}

const Lz4& lz4() {
  return published(opened_lz4, [] { return std::make_unique<Lz4>(); });
}

const Blosc& blosc() {
  return published(opened_blosc, [] { return std::make_unique<Blosc>(); });
}

constexpr int kBloscLevel = 1;  // of 0 to 9; 3 and 5 gain 1 % and 3 % on counts, at half the speed
constexpr int kBitShuffle = 2;  // blosc's name for sorting bits
constexpr std::size_t kBloscMost = 16;  // bytes by which a chunk may be larger than its content
constexpr int kZstdLevel = 3;           // zstd's own default
constexpr std::uint64_t kZstdRatio = 32768;  // a block of 4 bytes stands for at most 128 KiB
constexpr std::uint64_t kLz4Ratio = 255;     // a byte of a match's length stands for 255 bytes

[[noreturn]] void fail(Codec codec, const std::string& reason) {
  throw PackError(std::string("damaged ") + name_of(codec) + " data: " + reason);
}

}  // namespace

const char* name_of(Codec codec) {
  switch (codec) {
    case Codec::kRaw:
      return "raw";
    case Codec::kZstd:
      return "zstd";
    case Codec::kLz4:
      return "lz4";
    case Codec::kBlosc:
      return "blosc";
  }
  return "unknown";
}

void require(Codec codec) {
  if (codec == Codec::kZstd) zstd();
  if (codec == Codec::kLz4) lz4();
  if (codec == Codec::kBlosc) blosc();
}

std::vector<std::byte> compress(Compression how, std::span<const std::byte> raw) {
  const Codec codec = how.codec;
  if (raw.size() > kLargestCompressed) throw PackError("too large to be compressed");
  std::vector<std::byte> stored;
  std::size_t size = 0;
  if (codec == Codec::kZstd) {
    stored.resize(zstd().bound(raw.size()));
    size = zstd().compress(stored.data(), stored.size(), raw.data(), raw.size(), kZstdLevel);
    if (zstd().is_error(size) != 0) {
      throw PackError(std::string("zstd: ") + zstd().error_name(size));
    }
  } else if (codec == Codec::kLz4) {
    const int raw_size = static_cast<int>(raw.size());
    stored.resize(static_cast<std::size_t>(lz4().bound(raw_size)));
    const int written = lz4().compress(reinterpret_cast<const char*>(raw.data()),
                                       reinterpret_cast<char*>(stored.data()), raw_size,
                                       static_cast<int>(stored.size()));
    if (written <= 0) throw PackError("lz4: can't compress " + std::to_string(raw_size) + " bytes");
    size = static_cast<std::size_t>(written);
  } else if (codec == Codec::kBlosc) {
    stored.resize(raw.size() + kBloscMost);
    const int written = blosc().compress(kBloscLevel, kBitShuffle, how.item_size, raw.size(),
                                         raw.data(), stored.data(), stored.size(), "zstd", 0, 1);
    if (written <= 0) {
      throw PackError("blosc: can't compress " + std::to_string(raw.size()) + " bytes");
    }
    size = static_cast<std::size_t>(written);
  } else {
    throw PackError(std::string("no compression by codec ") + name_of(codec));
  }
  stored.resize(size);
  return stored;
}

void decompress(Codec codec, std::span<const std::byte> stored, std::span<std::byte> raw) {
  std::size_t size = 0;
  if (codec == Codec::kZstd) {
    size = zstd().decompress(raw.data(), raw.size(), stored.data(), stored.size());
    if (zstd().is_error(size) != 0) fail(codec, zstd().error_name(size));
  } else if (codec == Codec::kLz4) {
    if (stored.size() > kLargestCompressed || raw.size() > kLargestCompressed) {
      fail(codec, "too large");
    }
    const int read = lz4().decompress(
        reinterpret_cast<const char*>(stored.data()), reinterpret_cast<char*>(raw.data()),
        static_cast<int>(stored.size()), static_cast<int>(raw.size()));
    if (read < 0) fail(codec, "not a block, or larger than declared");
    size = static_cast<std::size_t>(read);
  } else if (codec == Codec::kBlosc) {
    // The library reads as many bytes as the chunk declares, so that is compared first.
    if (stored.size() > kLargestCompressed || raw.size() > kLargestCompressed ||
        blosc().validate(stored.data(), stored.size(), &size) != 0 || size != raw.size()) {
      fail(codec, "not a chunk, or of another size than declared");
    }
    const int read = blosc().decompress(stored.data(), raw.data(), raw.size(), 1);
    if (read < 0) fail(codec, "not a chunk");
    size = static_cast<std::size_t>(read);
  } else {
    throw PackError("codec " + std::to_string(static_cast<int>(codec)) + " is unknown");
  }
  if (size != raw.size()) {
    fail(codec, std::to_string(size) + " bytes instead of " + std::to_string(raw.size()));
  }
}

std::string fault_of_sizes(const Entry& entry) {
  if (entry.codec == Codec::kRaw) {
    return entry.stored_size == entry.raw_size ? "" : "is not compressed, and has two sizes";
  }
  // Blosc's compressors have at most the ratio of zstd.
  const std::uint64_t ratio = entry.codec == Codec::kLz4 ? kLz4Ratio : kZstdRatio;
  const bool possible = entry.raw_size <= kLargestCompressed &&
                        entry.stored_size < entry.raw_size &&
                        entry.raw_size / ratio <= entry.stored_size;
  return possible ? "" : "has impossible sizes before and after compression";
}

}  // namespace pydist::packs
