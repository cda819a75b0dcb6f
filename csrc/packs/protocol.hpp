// The messages between a server of partitions and its readers.
//
//   server: Challenge;  reader: Hello;  server: Welcome, then a bit per partition that it has
//   reader: Request;    server: Answer, then the bytes if its status is kOk;    and so on
//
// Both sides prove that they know the job's secret by a keyed hash of both nonces and of the pack's
// id. Integers are little-endian. Contents are not encrypted.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "packs/format.hpp"

namespace pydist::packs {

using Secret = std::array<std::byte, 16>;
using Nonce = std::array<std::byte, 16>;

inline constexpr Magic kServerMagic = {'P', 'D', 'S', 'E', 'R', 'V', 'E', '1'};
inline constexpr Magic kReaderMagic = {'P', 'D', 'R', 'E', 'A', 'D', 'E', '1'};

enum class Status : std::uint32_t {
  kOk = 0,
  kOtherVersion = 1,
  kOtherPack = 2,
  kOtherSecret = 3,
  kBadRequest = 4,  // outside of the pack
  kNotHere = 5,     // of a partition that the server does not have
};

struct Challenge {
  Magic magic;
  std::uint32_t version;
  std::uint32_t zeros;
  Nonce nonce;
};

struct Hello {
  Magic magic;
  std::uint32_t version;
  std::uint32_t zeros;
  PackId id;
  Nonce nonce;
  std::uint64_t proof;
};

struct Welcome {
  Status status;
  std::uint32_t partitions;  // of the pack
  std::uint64_t proof;
};

struct Request {
  std::uint32_t entry;
  std::uint32_t zeros;
  std::uint64_t offset;  // in the stored bytes of the file
  std::uint64_t size;
};

struct Answer {
  Status status;
  std::uint32_t zeros;
  std::uint64_t size;  // of the bytes that follow
};

static_assert(sizeof(Challenge) == 32 && sizeof(Hello) == 56 && sizeof(Welcome) == 16);
static_assert(sizeof(Request) == 24 && sizeof(Answer) == 16);

// SipHash-2-4 (Aumasson & Bernstein, 2012), a hash that only holders of the key can compute.
inline std::uint64_t siphash(const Secret& key, std::span<const std::byte> bytes) {
  std::uint64_t k[2];
  std::memcpy(k, key.data(), sizeof(k));
  std::uint64_t a = k[0] ^ 0x736f6d6570736575, b = k[1] ^ 0x646f72616e646f6d;
  std::uint64_t c = k[0] ^ 0x6c7967656e657261, d = k[1] ^ 0x7465646279746573;
  const auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i) {
      a += b, c += d;
      b = std::rotl(b, 13) ^ a, d = std::rotl(d, 16) ^ c;
      a = std::rotl(a, 32);
      c += b, a += d;
      b = std::rotl(b, 17) ^ c, d = std::rotl(d, 21) ^ a;
      c = std::rotl(c, 32);
    }
  };
  const auto absorb = [&](std::uint64_t word) {
    d ^= word;
    rounds(2);
    a ^= word;
  };
  std::uint64_t last = std::uint64_t{bytes.size()} << 56;
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data(), 8);
    absorb(word);
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    last |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  }
  absorb(last);
  c ^= 0xff;
  rounds(4);
  return a ^ b ^ c ^ d;
}

enum class Side : std::uint64_t { kReader = 1, kServer = 2 };

// What one side sends to prove that it knows the secret; the other side's nonce makes it fresh.
inline std::uint64_t proof_of(const Secret& secret, Side side, const Nonce& server,
                              const Nonce& reader, const PackId& id) {
  struct {
    Side side;
    Nonce server, reader;
    PackId id;
  } const all{side, server, reader, id};
  return siphash(secret, std::as_bytes(std::span(&all, 1)));
}

}  // namespace pydist::packs
