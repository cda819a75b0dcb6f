// The threads of a server, and the two messages that they answer.
#include "packs/server.hpp"

#if defined(__linux__)

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/sendfile.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>

#include "packs/sockets.hpp"

namespace pydist::packs {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kStallMilliseconds = kStallSeconds * 1000;
constexpr std::size_t kMostConnections = 65536;
constexpr std::chrono::seconds kHelloLimit{10};
constexpr int kTurn = 64;  // requests of one connection before the others have their turn

// Sends all bytes of a socket whose calls do not block; false if it ends or stalls.
bool push(int socket, std::span<const std::byte> bytes, int flags) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | flags);
    if (sent > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    } else if (sent < 0 && errno == EAGAIN) {
      pollfd waited{socket, POLLOUT, 0};
      if (::poll(&waited, 1, kStallMilliseconds) == 0) return false;
    } else if (sent == 0 || errno != EINTR) {
      return false;
    }
  }
  return true;
}

template <class T>
bool push_value(int socket, const T& value, int flags) {
  return push(socket, std::as_bytes(std::span(&value, 1)), flags);
}

}  // namespace

// Used by one thread at a time: that which epoll has woken for it, until it is armed again.
struct Server::Connection {
  std::mutex turn;  // hands the connection from one thread to the next one
  Descriptor socket;
  Nonce nonce;
  Clock::time_point began;
  std::atomic<bool> welcomed{false};
  std::array<std::byte, sizeof(Hello)> buffer{};
  std::size_t filled = 0;

  // Receives what has come of a message; kNext when it is complete.
  template <class T>
  Step receive(T& message) {
    static_assert(sizeof(T) <= sizeof(buffer));
    while (filled < sizeof(T)) {
      const ssize_t got =
          ::recv(socket.get(), buffer.data() + filled, sizeof(T) - filled, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return Step::kWait;
      if (got <= 0) return Step::kEnd;
      filled += static_cast<std::size_t>(got);
    }
    std::memcpy(&message, buffer.data(), sizeof(T));
    filled = 0;
    return Step::kNext;
  }
};

Server::Server(std::shared_ptr<const Folder> folder, const std::string& address,
               const Secret& secret, int threads)
    : folder_(std::move(folder)), secret_(secret) {
  const std::uint32_t partitions = folder_->index().partitions();
  bits_.resize((partitions + 7) / 8);
  for (std::uint32_t i = 0; i < partitions; ++i) {
    if (!folder_->is_here(i)) continue;
    folder_->partition_fd(i);
    bits_[i / 8] |= std::byte{1} << (i % 8);
    ++here_;
  }
  if (here_ == 0) throw PackError(folder_->path() + ": it has no partition that could be served");
  listening_ = listen_at(address);
  address_ = address_of(listening_, address);
  ::fcntl(listening_.get(), F_SETFL, ::fcntl(listening_.get(), F_GETFL) | O_NONBLOCK);
  epoll_ = Descriptor(::epoll_create1(EPOLL_CLOEXEC));
  wake_ = Descriptor(::eventfd(0, EFD_CLOEXEC));
  if (epoll_.get() < 0 || wake_.get() < 0) throw_system(address_);
  arm(listening_.get(), EPOLLIN | EPOLLONESHOT, false);
  arm(wake_.get(), EPOLLIN, false);  // stays readable, for every thread
  for (int i = 0; i < std::max(threads, 1); ++i) threads_.emplace_back([this] { work(); });
}

Server::~Server() {
  stopped_.store(true);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
  {
    // A thread that sends to a reader that does not take it ends as well.
    const std::lock_guard lock(mutex_);
    for (const auto& [descriptor, connection] : connections_) ::shutdown(descriptor, SHUT_RDWR);
  }
  for (std::thread& thread : threads_) thread.join();
  if (address_.find('/') != std::string::npos) ::unlink(address_.c_str());
}

void Server::arm(int descriptor, std::uint32_t events, bool added) {
  epoll_event event{};
  event.events = events;
  event.data.fd = descriptor;
  ::epoll_ctl(epoll_.get(), added ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, descriptor, &event);
}

void Server::work() {
  sigset_t pipe;  // sendfile to a reader that is gone raises it, and then says EPIPE
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  while (!stopped_.load()) {
    epoll_event event{};
    const int ready = ::epoll_wait(epoll_.get(), &event, 1, 1000);
    if (stopped_.load()) return;
    drop_late();
    if (ready <= 0 || event.data.fd == wake_.get()) continue;
    if (event.data.fd == listening_.get()) {
      accept_all();
      continue;
    }
    Connection* connection = nullptr;
    {
      const std::lock_guard lock(mutex_);
      const auto found = connections_.find(event.data.fd);
      if (found != connections_.end()) connection = found->second.get();
    }
    if (connection == nullptr) continue;
    try {
      serve(*connection);
    } catch (const std::exception&) {  // such as no memory: this reader's problem alone
      forget(event.data.fd);
    }
  }
}

void Server::accept_all() {
  for (;;) {
    Descriptor socket(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.get() < 0) {
      // Without descriptors left the next attempt would come at once, and for ever.
      if (errno == EMFILE || errno == ENFILE) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
      if (errno == ECONNABORTED || errno == EINTR) continue;
      break;
    }
    const int on = 1;  // neither is needed by a Unix socket
    ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    ::setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    auto connection = std::make_unique<Connection>();
    connection->nonce = random_nonce();
    connection->began = Clock::now();
    const Challenge challenge{kServerMagic, kVersion, 0, connection->nonce};
    const int descriptor = socket.get();
    connection->socket = std::move(socket);
    {
      const std::lock_guard lock(mutex_);
      if (connections_.size() >= kMostConnections) continue;
      if (!push_value(descriptor, challenge, 0)) continue;
      connections_[descriptor] = std::move(connection);
    }
    arm(descriptor, EPOLLIN | EPOLLRDHUP | EPOLLONESHOT, false);
  }
  arm(listening_.get(), EPOLLIN | EPOLLONESHOT, true);
}

void Server::serve(Connection& connection) {
  const int descriptor = connection.socket.get();
  {
    const std::lock_guard lock(connection.turn);
    Step step = Step::kNext;
    for (int i = 0; i < kTurn && step == Step::kNext; ++i) {
      step = connection.welcomed.load() ? answer(connection) : welcome(connection);
    }
    if (step != Step::kEnd) return arm(descriptor, EPOLLIN | EPOLLRDHUP | EPOLLONESHOT, true);
  }
  forget(descriptor);
}

Server::Step Server::welcome(Connection& connection) {
  Hello hello{};
  if (const Step step = connection.receive(hello); step != Step::kNext) return step;
  const int socket = connection.socket.get();
  const PackId& id = folder_->index().id();
  Welcome welcome{Status::kOk, folder_->index().partitions(), 0};
  if (hello.magic != kReaderMagic) return Step::kEnd;
  if (hello.version != kVersion) {
    welcome.status = Status::kOtherVersion;
  } else if (hello.id != id) {
    welcome.status = Status::kOtherPack;
  } else if (hello.proof != proof_of(secret_, Side::kReader, connection.nonce, hello.nonce, id)) {
    welcome.status = Status::kOtherSecret;
  }
  if (welcome.status != Status::kOk) {
    welcome.partitions = 0;
    push_value(socket, welcome, 0);
    return Step::kEnd;
  }
  welcome.proof = proof_of(secret_, Side::kServer, connection.nonce, hello.nonce, id);
  connection.welcomed.store(true);
  const bool sent = push_value(socket, welcome, MSG_MORE) && push(socket, bits_, 0);
  return sent ? Step::kNext : Step::kEnd;
}

Server::Step Server::answer(Connection& connection) {
  Request request{};
  if (const Step step = connection.receive(request); step != Step::kNext) return step;
  const int socket = connection.socket.get();
  const Index& index = folder_->index();
  Answer answer{Status::kOk, 0, request.size};
  const Entry* entry = request.entry < index.size() ? &index.entry(request.entry) : nullptr;
  if (entry == nullptr || entry->kind != Kind::kFile || request.offset > entry->stored_size ||
      request.size > entry->stored_size - request.offset) {
    answer = {Status::kBadRequest, 0, 0};
  } else if (entry->partition >= index.partitions() ||
             (bits_[entry->partition / 8] & (std::byte{1} << (entry->partition % 8))) ==
                 std::byte{0}) {
    answer = {Status::kNotHere, 0, 0};
  }
  requests_.fetch_add(1);
  const bool empty = answer.size == 0;
  const bool sent = push_value(socket, answer, empty ? 0 : MSG_MORE) &&
                    (empty || send_stored(socket, *entry, request));
  return sent ? Step::kNext : Step::kEnd;
}

bool Server::send_stored(int socket, const Entry& entry, const Request& request) {
  // The range is in the partition: its size is checked when it is opened, and so is this sum.
  const std::uint64_t size = folder_->index().partition_size(entry.partition);
  if (entry.offset > size || entry.stored_size > size - entry.offset) return false;
  const int file = folder_->partition_fd(entry.partition);
  auto offset = static_cast<off_t>(entry.offset + request.offset);
  for (std::uint64_t left = request.size; left > 0;) {
    const ssize_t sent = ::sendfile(socket, file, &offset, left);
    if (sent > 0) {
      left -= static_cast<std::uint64_t>(sent);
      bytes_.fetch_add(static_cast<std::uint64_t>(sent));
    } else if (sent < 0 && errno == EAGAIN) {
      pollfd waited{socket, POLLOUT, 0};
      if (::poll(&waited, 1, kStallMilliseconds) == 0) return false;
    } else if (sent == 0 || errno != EINTR) {
      return false;  // the reader is gone, or the partition was cut short
    }
  }
  return true;
}

void Server::forget(int descriptor) {
  // Closed under the lock: the next connection may get the same number.
  const std::lock_guard lock(mutex_);
  connections_.erase(descriptor);
}

void Server::drop_late() {
  const auto now = Clock::now();
  const auto second = std::chrono::duration_cast<std::chrono::seconds>(now.time_since_epoch());
  if (swept_.exchange(second.count()) == second.count()) return;
  const std::lock_guard lock(mutex_);
  for (const auto& [descriptor, connection] : connections_) {
    if (!connection->welcomed.load() && now - connection->began > kHelloLimit) {
      ::shutdown(descriptor, SHUT_RDWR);  // its thread closes it
    }
  }
}

}  // namespace pydist::packs

#else

namespace pydist::packs {

struct Server::Connection {};

Server::Server(std::shared_ptr<const Folder> folder, const std::string&, const Secret&, int) {
  throw PackError(folder->path() + ": packs are served on Linux alone");
}

Server::~Server() = default;

}  // namespace pydist::packs

#endif
