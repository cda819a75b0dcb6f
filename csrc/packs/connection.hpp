// The state of one reader's connection to a server: what it receives, and what is left to send.
//
// No call waits for the reader. Where the socket has no bytes or no room, the state is kept, and
// the next thread that epoll wakes for this socket continues from there.
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

// Used by one thread at a time: the one that epoll has woken for it, until it is armed again. The
// atomic members are also read by the thread that disconnects late readers (Server::drop_late).
struct Connection {
  // Locked by the thread whose turn it is. Epoll already ensures that there is only one; the lock
  // makes its writes visible to the next one.
  std::mutex turn;
  Descriptor socket;                   // does not block
  Nonce nonce;                         // the server's, as sent in the Challenge
  std::atomic<bool> welcomed{false};   // a proof was right: requests are answered from here on
  std::atomic<bool> waited_for{true};  // the reader must say hello, or take what is sent
  // Steady seconds: when it was accepted, last took a byte, or last made a request that is answered
  // with bytes.
  std::atomic<std::int64_t> moved{now()};
  bool last = false;  // it ends when all is sent

  // The first `filled` bytes of a message that has not arrived completely. A Hello is the longest.
  std::array<std::byte, sizeof(Hello)> received{};
  std::size_t filled = 0;

  // To be sent: `head` from byte `sent` on, then `left` bytes of `file` from `offset` on. The file
  // is a partition that the server's folder has open, and is not closed here.
  std::vector<std::byte> head;
  std::size_t sent = 0;
  int file = -1;
  off_t offset = 0;
  std::uint64_t left = 0;

  // Receives what has come of a message. kNext: it is complete; kReceive: bytes are missing, and
  // the next call, for the same T, goes on; kEnd: the reader has hung up, or the socket failed.
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

  // Appends a message to `head`, for the next flush.
  template <class T>
  void send_later(const T& value) {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    head.insert(head.end(), bytes.begin(), bytes.end());
  }

  // Sends as much as the socket takes, up to a piece. kNext: nothing is left; kSend: more is; kEnd:
  // the reader is gone, or the file is shorter than it was. Adds to `bytes` what was sent of the
  // file. MSG_MORE lets the answer travel in one packet with the first bytes of the file.
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

  // Bytes of a file that one call of flush sends at most: then other connections have their turn.
  static constexpr std::uint64_t kPiece = std::uint64_t{8} << 20;
};

}  // namespace pydist::packs

#endif
