// The state of one reader's connection to a server: what it receives, and what is left to send.
#pragma once

#if defined(__linux__)

#include <sys/sendfile.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <span>
#include <vector>

#include "packs/protocol.hpp"
#include "packs/system.hpp"

namespace pydist::packs {

// What a connection does next: go on, wait until it can receive or send, or end.
enum class Step { kNext, kReceive, kSend, kEnd };

// Used by one thread at a time: that which epoll has woken for it, until it is armed again.
struct Connection {
  std::mutex turn;  // hands the connection from one thread to the next one
  Descriptor socket;
  Nonce nonce;
  std::atomic<bool> welcomed{false};
  std::atomic<bool> waited_for{true};      // the reader must say hello, or take what is sent
  std::atomic<std::int64_t> moved{now()};  // when it last took a byte, or was accepted
  bool last = false;                       // it ends when all is sent

  std::array<std::byte, sizeof(Hello)> received{};
  std::size_t filled = 0;

  // To be sent: `head` from byte `sent` on, then `left` bytes of `file`.
  std::vector<std::byte> head;
  std::size_t sent = 0;
  int file = -1;
  off_t offset = 0;
  std::uint64_t left = 0;

  // Receives what has come of a message; kNext when it is complete.
  template <class T>
  Step receive(T& message) {
    static_assert(sizeof(T) <= sizeof(received));
    while (filled < sizeof(T)) {
      const ssize_t got =
          ::recv(socket.get(), received.data() + filled, sizeof(T) - filled, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return Step::kReceive;
      if (got <= 0) return Step::kEnd;
      filled += static_cast<std::size_t>(got);
    }
    std::memcpy(&message, received.data(), sizeof(T));
    filled = 0;
    return Step::kNext;
  }

  template <class T>
  void send_later(const T& value) {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    head.insert(head.end(), bytes.begin(), bytes.end());
  }

  // Sends as much as the socket takes, up to a piece; kNext when nothing is left. Adds to `bytes`
  // what was sent of the file.
  Step flush(std::atomic<std::uint64_t>& bytes) {
    const std::uint64_t end = left - std::min(left, kPiece);
    while (sent < head.size() || left > 0) {
      ssize_t done;
      if (sent < head.size()) {
        const int more = left > 0 ? MSG_MORE : 0;
        done = ::send(socket.get(), head.data() + sent, head.size() - sent,
                      MSG_NOSIGNAL | MSG_DONTWAIT | more);
        if (done > 0) sent += static_cast<std::size_t>(done);
      } else {
        if (left == end) return Step::kSend;
        done = ::sendfile(socket.get(), file, &offset, left - end);
        if (done > 0) {
          left -= static_cast<std::uint64_t>(done);
          bytes.fetch_add(static_cast<std::uint64_t>(done));
        }
      }
      if (done > 0) moved.store(now());
      if (done < 0 && errno == EAGAIN) return Step::kSend;
      // The reader is gone, or the partition was cut short.
      if (done == 0 || (done < 0 && errno != EINTR)) return Step::kEnd;
    }
    head.clear();
    sent = 0;
    return Step::kNext;
  }

  static constexpr std::uint64_t kPiece = std::uint64_t{8} << 20;
};

}  // namespace pydist::packs

#endif
