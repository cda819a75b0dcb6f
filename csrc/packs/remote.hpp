// Reads stored bytes from servers on other nodes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "packs/protocol.hpp"
#include "packs/system.hpp"

namespace pydist::packs {

// Connections to the servers of one pack, made when they are first needed and kept. Thread-safe
// without locks; a fork's child makes its own.
class Remote {
 public:
  // addresses: see sockets.hpp. partitions: their number, as in the index.
  Remote(const std::vector<std::string>& addresses, const Secret& secret, const PackId& id,
         std::uint32_t partitions);
  ~Remote();
  Remote(const Remote&) = delete;
  Remote& operator=(const Remote&) = delete;

  // Reads a part of the stored bytes of a file, in one round trip to a server that has its
  // partition. If one fails, the others are asked. Throws PackError with all reasons if none
  // answers.
  void read(const Request& request, std::uint32_t partition, std::span<std::byte> out) const;

 private:
  static constexpr std::size_t kIdle = 32;  // connections per server that are kept
  enum class Has : std::uint8_t { kUnknown, kYes, kNo };

  struct Peer {
    std::string address;
    // Connections that no thread uses: the process that made it and the descriptor; 0 for none.
    std::array<std::atomic<std::uint64_t>, kIdle> idle{};
    std::unique_ptr<std::atomic<Has>[]> has;  // by partition, known since the first connection
    std::atomic<std::int64_t> failed_at{0};   // in steady seconds; 0 if the last attempt succeeded
  };

  Descriptor connect(Peer& peer) const;
  static Descriptor take(Peer& peer);
  static void keep(Peer& peer, Descriptor connection);
  // False if the connection ended, so that another one may succeed; PackError if the server
  // refuses.
  static bool exchange(const Peer& peer, int connection, const Request& request,
                       std::span<std::byte> out);
  void read_from(Peer& peer, const Request& request, std::span<std::byte> out) const;

  Secret secret_;
  PackId id_;
  std::uint32_t partitions_;
  std::vector<std::unique_ptr<Peer>> peers_;
};

}  // namespace pydist::packs
