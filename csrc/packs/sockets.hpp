// Stream sockets with time limits: TCP, or Unix sockets on one machine.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "packs/protocol.hpp"
#include "packs/system.hpp"

namespace pydist::packs {

inline constexpr int kConnectSeconds = 5;
inline constexpr int kStallSeconds = 30;  // without one byte sent or received

// Addresses: "HOST:PORT", "[IPV6]:PORT", or the path of a Unix socket, which has a '/'.

// Opens a socket that listens. Port 0 lets the system choose; a Unix socket is for this user alone,
// and takes the place of one at which no process listens.
Descriptor listen_at(const std::string& address);

// The address at which a socket listens, with its port.
std::string address_of(const Descriptor& listening, const std::string& asked);

// Connects, or throws PackError with the reason.
Descriptor connect_to(const std::string& address);

// Sends or receives all bytes of a socket whose calls block; false if it ends before, or if it
// stalls: errno is EAGAIN then.
bool send_all(int socket, std::span<const std::byte> bytes);
bool receive_all(int socket, std::span<std::byte> bytes);

template <class T>
bool send_value(int socket, const T& value) {
  return send_all(socket, std::as_bytes(std::span(&value, 1)));
}

template <class T>
bool receive_value(int socket, T& value) {
  return receive_all(socket, std::as_writable_bytes(std::span(&value, 1)));
}

// Bytes from the system's generator.
Nonce random_nonce();

}  // namespace pydist::packs
