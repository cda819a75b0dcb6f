// Addresses, connecting and listening, with time limits.
#include "packs/sockets.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace pydist::packs {
namespace {

#if defined(MSG_NOSIGNAL)
constexpr int kNoSignal = MSG_NOSIGNAL;
#else
constexpr int kNoSignal = 0;
#endif

struct Place {
  int family = AF_UNIX;
  socklen_t size = 0;
  sockaddr_storage storage{};
  const sockaddr* address() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Place unix_place(const std::string& path) {
  Place place;
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (path.size() >= sizeof(name.sun_path)) {
    throw PackError(path + ": too long for the path of a socket, which may have " +
                    std::to_string(sizeof(name.sun_path) - 1) + " bytes");
  }
  std::memcpy(name.sun_path, path.data(), path.size());
  std::memcpy(&place.storage, &name, sizeof(name));
  place.size = sizeof(name);
  return place;
}

// All places that an address may mean: a host can have several.
std::vector<Place> resolve(const std::string& address, bool listening) {
  if (address.find('/') != std::string::npos) return {unix_place(address)};
  const std::size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  if (port.empty() || port.find_first_not_of("0123456789") != std::string::npos) {
    throw PackError("address '" + address + "': HOST:PORT, or the path of a Unix socket");
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = listening ? AI_PASSIVE : 0;
  addrinfo* found = nullptr;
  const char* name = host.empty() ? nullptr : host.c_str();
  const int failed = ::getaddrinfo(name, port.c_str(), &hints, &found);
  if (failed != 0) throw PackError(address + ": " + ::gai_strerror(failed));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  std::vector<Place> places;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    Place& place = places.emplace_back();
    place.family = each->ai_family;
    place.size = static_cast<socklen_t>(each->ai_addrlen);
    std::memcpy(&place.storage, each->ai_addr, each->ai_addrlen);
  }
  return places;
}

Descriptor new_socket(const Place& place, const std::string& address) {
  Descriptor made(::socket(place.family, SOCK_STREAM, 0));
  if (made.get() < 0) throw_system(address);
  ::fcntl(made.get(), F_SETFD, FD_CLOEXEC);
  return made;
}

void set(int socket, int level, int option, int value) {
  ::setsockopt(socket, level, option, &value, sizeof(value));  // at worst slower
}

// Whether a call failed since a signal came, and is to be made again: signals that come again and
// again must not make it wait for ever.
bool was_interrupted(std::int64_t since, int seconds) {
  if (errno != EINTR) return false;
  errno = EAGAIN;
  return now() - since <= seconds;
}

bool wait_for(int socket, short events, int seconds) {
  pollfd waited{socket, events, 0};
  const std::int64_t since = now();
  int ready;
  do {
    ready = ::poll(&waited, 1, seconds * 1000);
  } while (ready < 0 && was_interrupted(since, seconds));
  if (ready == 0 || (ready < 0 && errno == EAGAIN)) errno = ETIMEDOUT;
  return ready > 0;
}

// Removes a Unix socket at which no process listens any more.
void remove_abandoned(const Place& place, const std::string& path) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) != 0 || !S_ISSOCK(status.st_mode)) return;
  const Descriptor probe = new_socket(place, path);
  if (::connect(probe.get(), place.address(), place.size) != 0 && errno == ECONNREFUSED) {
    ::unlink(path.c_str());
  }
}

}  // namespace

Descriptor listen_at(const std::string& address) {
  const Place place = resolve(address, true).front();
  Descriptor listening = new_socket(place, address);
  if (place.family == AF_UNIX) {
    remove_abandoned(place, address);
  } else {
    set(listening.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  }
  if (::bind(listening.get(), place.address(), place.size) != 0) throw_system(address);
  // Before any client can connect: no process listens yet.
  if (place.family == AF_UNIX && ::chmod(address.c_str(), 0600) != 0) throw_system(address);
  if (::listen(listening.get(), SOMAXCONN) != 0) throw_system(address);
  return listening;
}

std::string address_of(const Descriptor& listening, const std::string& asked) {
  Place place;
  place.size = sizeof(place.storage);
  auto* address = reinterpret_cast<sockaddr*>(&place.storage);
  if (::getsockname(listening.get(), address, &place.size) != 0) throw_system(asked);
  std::uint16_t port = 0;
  if (place.storage.ss_family == AF_INET) {
    port = reinterpret_cast<const sockaddr_in*>(&place.storage)->sin_port;
  } else if (place.storage.ss_family == AF_INET6) {
    port = reinterpret_cast<const sockaddr_in6*>(&place.storage)->sin6_port;
  } else {
    return asked;
  }
  return asked.substr(0, asked.rfind(':') + 1) + std::to_string(ntohs(port));
}

namespace {

Descriptor connect_at(const Place& place, const std::string& address) {
  Descriptor made = new_socket(place, address);
  const int flags = ::fcntl(made.get(), F_GETFL);
  ::fcntl(made.get(), F_SETFL, flags | O_NONBLOCK);
  if (::connect(made.get(), place.address(), place.size) != 0) {
    // A Unix socket whose queue is full says EAGAIN, and a signal interrupts without ending it.
    if (errno != EINPROGRESS && errno != EINTR) throw_system(address);
    if (!wait_for(made.get(), POLLOUT, kConnectSeconds)) throw_system(address);
    int error = 0;
    socklen_t size = sizeof(error);
    ::getsockopt(made.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      errno = error;
      throw_system(address);
    }
  }
  ::fcntl(made.get(), F_SETFL, flags);
  const timeval limit{kStallSeconds, 0};
  ::setsockopt(made.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  ::setsockopt(made.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
#if defined(SO_NOSIGPIPE)
  set(made.get(), SOL_SOCKET, SO_NOSIGPIPE, 1);
#endif
  if (place.family != AF_UNIX) set(made.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  return made;
}

}  // namespace

Descriptor connect_to(const std::string& address) {
  const std::vector<Place> places = resolve(address, false);
  for (std::size_t i = 0; i + 1 < places.size(); ++i) {
    try {
      return connect_at(places[i], address);
    } catch (const PackError&) {  // the next one may answer; the last one's reason is told
    }
  }
  return connect_at(places.back(), address);
}

bool send_all(int socket, std::span<const std::byte> bytes) {
  std::int64_t moved = now();
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), kNoSignal);
    if (sent < 0 && was_interrupted(moved, kStallSeconds)) continue;
    if (sent <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(sent));
    moved = now();
  }
  return true;
}

bool receive_all(int socket, std::span<std::byte> bytes) {
  std::int64_t moved = now();
  while (!bytes.empty()) {
    const ssize_t got = ::recv(socket, bytes.data(), bytes.size(), 0);
    if (got < 0 && was_interrupted(moved, kStallSeconds)) continue;
    if (got == 0) errno = 0;
    if (got <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(got));
    moved = now();
  }
  return true;
}

Nonce random_nonce() {
  std::random_device device;  // of the kernel
  Nonce nonce;
  for (std::size_t i = 0; i < nonce.size(); i += 4) {
    const std::uint32_t word = device();
    std::memcpy(nonce.data() + i, &word, 4);
  }
  return nonce;
}

}  // namespace pydist::packs
