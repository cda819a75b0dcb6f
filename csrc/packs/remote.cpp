// Connections to servers, and which of them has which partition.
#include "packs/remote.hpp"

#include "packs/sockets.hpp"

namespace pydist::packs {
namespace {

// A server that failed is asked last for so long: much longer than an attempt that stalls takes.
constexpr std::int64_t kRestSeconds = 10 * kStallSeconds;

std::uint64_t this_process() { return static_cast<std::uint64_t>(::getpid()) << 32; }

const char* reason_of(Status status) {
  switch (status) {
    case Status::kOtherVersion:
      return "it has another version of pydist's protocol";
    case Status::kOtherPack:
      return "it serves another pack";
    case Status::kOtherSecret:
      return "it has another secret";
    case Status::kBadRequest:
      return "it says that there are no such bytes";
    case Status::kNotHere:
      return "it does not have the partition";
    case Status::kOk:
      break;
  }
  return "its answer makes no sense";
}

}  // namespace

Remote::Remote(const std::vector<std::string>& addresses, const Secret& secret, const PackId& id,
               std::uint32_t partitions)
    : secret_(secret), id_(id), partitions_(partitions) {
  for (const std::string& address : addresses) {
    auto peer = std::make_unique<Peer>();
    peer->address = address;
    peer->has = std::make_unique<std::atomic<Has>[]>(partitions);
    for (std::uint32_t i = 0; i < partitions; ++i) peer->has[i].store(Has::kUnknown);
    peers_.push_back(std::move(peer));
  }
}

Remote::~Remote() {
  for (const auto& peer : peers_) {
    for (auto& slot : peer->idle) {
      const std::uint64_t kept = slot.load();
      if (kept != 0) const Descriptor closed(static_cast<int>(kept & 0xFFFFFFFF));
    }
  }
}

Descriptor Remote::take(Peer& peer) {
  for (auto& slot : peer.idle) {
    const std::uint64_t kept = slot.exchange(0);
    if (kept == 0) continue;
    Descriptor connection(static_cast<int>(kept & 0xFFFFFFFF));
    // That of a fork's parent: closed here, where it would mix up two processes' messages.
    if ((kept & ~std::uint64_t{0xFFFFFFFF}) != this_process()) continue;
    return connection;
  }
  return Descriptor();
}

void Remote::keep(Peer& peer, Descriptor connection) {
  const std::uint64_t kept = this_process() | static_cast<std::uint32_t>(connection.get());
  for (auto& slot : peer.idle) {
    std::uint64_t none = 0;
    if (slot.compare_exchange_strong(none, kept)) {
      connection.release();
      return;
    }
  }
}

Descriptor Remote::connect(Peer& peer) const {
  Descriptor made = connect_to(peer.address);
  const auto fail = [&peer](const char* reason) { throw PackError(peer.address + ": " + reason); };
  Challenge challenge{};
  if (!receive_value(made.get(), challenge)) fail("no answer");
  if (challenge.magic != kServerMagic) fail("not a server of packs");
  if (challenge.version != kVersion) fail(reason_of(Status::kOtherVersion));
  Hello hello{kReaderMagic, kVersion, 0, id_, random_nonce(), 0};
  hello.proof = proof_of(secret_, Side::kReader, challenge.nonce, hello.nonce, id_);
  Welcome welcome{};
  if (!send_value(made.get(), hello) || !receive_value(made.get(), welcome)) fail("it hung up");
  if (welcome.status != Status::kOk) fail(reason_of(welcome.status));
  if (welcome.proof != proof_of(secret_, Side::kServer, challenge.nonce, hello.nonce, id_)) {
    fail(reason_of(Status::kOtherSecret));
  }
  if (welcome.partitions != partitions_) fail(reason_of(Status::kOtherPack));
  std::vector<std::byte> bits((partitions_ + 7) / 8);
  if (!receive_all(made.get(), bits)) fail("it hung up");
  for (std::uint32_t i = 0; i < partitions_; ++i) {
    const bool set = ((std::to_integer<unsigned>(bits[i / 8]) >> (i % 8)) & 1) != 0;
    peer.has[i].store(set ? Has::kYes : Has::kNo);
  }
  return made;
}

bool Remote::exchange(const Peer& peer, int connection, const Request& request,
                      std::span<std::byte> out) {
  const auto ended = [&peer] {
    // Another connection would stall as well.
    if (errno == EAGAIN) {
      throw PackError(peer.address + ": not a byte in " + std::to_string(kStallSeconds) + " s");
    }
    return false;
  };
  Answer answer{};
  if (!send_value(connection, request) || !receive_value(connection, answer)) return ended();
  if (answer.status != Status::kOk || answer.size != out.size()) {
    throw PackError(peer.address + ": " + reason_of(answer.status));
  }
  return receive_all(connection, out) || ended();
}

void Remote::read_from(Peer& peer, const Request& request, std::span<std::byte> out) const {
  // A kept connection may have ended meanwhile, as when the server was restarted.
  for (Descriptor kept = take(peer); kept.get() >= 0; kept = take(peer)) {
    if (exchange(peer, kept.get(), request, out)) return keep(peer, std::move(kept));
  }
  Descriptor made = connect(peer);
  if (!exchange(peer, made.get(), request, out)) {
    throw PackError(peer.address + ": it hung up");
  }
  keep(peer, std::move(made));
}

void Remote::read(const Request& request, std::uint32_t partition, std::span<std::byte> out) const {
  std::string reasons;
  // Where several servers have a partition, processes begin with different ones.
  const std::size_t first = partition + static_cast<std::size_t>(::getpid());
  std::vector<bool> rests(peers_.size());
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const std::int64_t failed_at = peers_[i]->failed_at.load();
    rests[i] = failed_at != 0 && now() - failed_at < kRestSeconds;
  }
  for (const bool rest : {false, true}) {
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      const std::size_t chosen = (first + i) % peers_.size();
      if (rests[chosen] != rest) continue;
      Peer& peer = *peers_[chosen];
      if (peer.has[partition].load() == Has::kNo) continue;
      try {
        if (peer.has[partition].load() == Has::kUnknown) {
          keep(peer, connect(peer));
          if (peer.has[partition].load() == Has::kNo) continue;
        }
        read_from(peer, request, out);
        peer.failed_at.store(0);
        return;
      } catch (const PackError& error) {
        peer.failed_at.store(now());
        // If its node is lost, each connection that was kept would stall as well.
        while (take(peer).get() >= 0) continue;
        reasons += (reasons.empty() ? "" : "; ") + std::string(error.what());
      }
    }
  }
  const std::string name = partition_name(partition);
  if (reasons.empty()) reasons = "none of the servers has it";
  throw PackError(name + ": not on this node, and no server sends it: " + reasons);
}

}  // namespace pydist::packs
