// The messages between a server of partitions and its readers, over a stream socket.
//
//   server: Challenge;  reader: Hello;  server: Welcome, then its partitions if its status is kOk
//   reader: Request;    server: Answer, then the bytes if its status is kOk;    and so on
//
// The partitions are a bit for each partition of the pack, set if the server has it: partition i is
// bit i % 8 (bit 0 has the value 1) of byte i / 8, and unused bits of the last byte are 0.
//
// Structs are sent as they are in memory: fields in this order, without padding (each struct has a
// static_assert on its size), integers little-endian (format.hpp has the static_assert). A reader
// sends one request at a time, and waits for its answer. After a Welcome that is not kOk, or a
// Hello with another magic, the server ends the connection.
//
// Both sides prove that they know the job's secret by a keyed hash of both nonces and of the pack's
// id. Contents are neither encrypted nor signed: a reader compares whole files with the checksums
// of its index, but not parts of files.
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

using Secret = std::array<std::byte, 16>;  // the key of siphash; equal in all processes of a job
using Nonce = std::array<std::byte, 16>;   // random bytes, new for each connection

inline constexpr Magic kServerMagic = {'P', 'D', 'S', 'E', 'R', 'V', 'E', '1'};
inline constexpr Magic kReaderMagic = {'P', 'D', 'R', 'E', 'A', 'D', 'E', '1'};

// How a server answers; the numbers are sent. A Welcome has one of the first four, an Answer kOk or
// one of the last two.
enum class Status : std::uint32_t {
  kOk = 0,
  kOtherVersion = 1,  // the reader's kVersion is not the server's
  kOtherPack = 2,     // another PackId
  kOtherSecret = 3,   // a wrong proof
  kBadRequest = 4,    // outside of the pack
  kNotHere = 5,       // of a partition that the server does not have
};

// The fields `zeros` align the next field to 8 bytes: they are sent as 0, and not checked.

// The first message of a connection. Its nonce is new, so the Hello of an earlier connection, which
// an eavesdropper may have recorded, has a wrong proof.
struct Challenge {
  Magic magic;            // kServerMagic: a reader that meets another service stops here
  std::uint32_t version;  // kVersion of the server
  std::uint32_t zeros;
  Nonce nonce;  // the server's
};

// The reader says which pack it wants, and proves that it may have it.
struct Hello {
  Magic magic;            // kReaderMagic
  std::uint32_t version;  // kVersion of the reader
  std::uint32_t zeros;
  PackId id;            // of the index that the reader has
  Nonce nonce;          // the reader's: the server's proof must contain it
  std::uint64_t proof;  // proof_of(Side::kReader)
};

// The end of the handshake. If the status is not kOk, the other fields are 0.
struct Welcome {
  Status status;
  std::uint32_t partitions;  // of the pack; the reader refuses another number than its index has
  std::uint64_t proof;       // proof_of(Side::kServer): a reader trusts no other server
};

// A range of the stored bytes of a file: those in the partition, which may be compressed.
struct Request {
  std::uint32_t entry;  // number of the file in the index
  std::uint32_t zeros;
  std::uint64_t offset;  // bytes from the start of the file's stored bytes
  std::uint64_t size;    // bytes; the range must end within the file's stored bytes
};

// `size` bytes follow: all that were requested, or none if the status is not kOk.
struct Answer {
  Status status;
  std::uint32_t zeros;
  std::uint64_t size;
};

static_assert(sizeof(Challenge) == 32 && sizeof(Hello) == 56 && sizeof(Welcome) == 16);
static_assert(sizeof(Request) == 24 && sizeof(Answer) == 16);

// SipHash-2-4 (Aumasson & Bernstein, 2012), a hash that only holders of the key can compute: 64
// bits of any number of bytes. Proof: tests/native/test_packs_served.cpp has vectors of the
// authors.
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

// Who sends a proof. Without this, a reader's proof would be the server's, too, and an impostor
// could send it back.
enum class Side : std::uint64_t { kReader = 1, kServer = 2 };

// What one side sends to prove that it knows the secret; the other side's nonce makes it fresh. The
// hash of 56 bytes: side, the server's nonce, the reader's, and the pack's id.
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
