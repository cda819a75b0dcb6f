// The threads of a server, its connections, and the two messages that it answers.
#include "packs/server.hpp"

#if defined(__linux__)

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>

#include "packs/connection.hpp"
#include "packs/sockets.hpp"

namespace pydist::packs {
namespace {

constexpr std::size_t kMostConnections = 65536;
constexpr std::int64_t kHelloSeconds = 10;
constexpr int kTurn = 64;  // messages of one connection before the others have their turn

}  // namespace

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
  try {
    for (int i = 0; i < std::max(threads, 1); ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::exception& error) {
    const std::string started = std::to_string(threads_.size());
    stop();
    throw PackError(address_ + ": " + started + " of " + std::to_string(threads) +
                    " threads could be started: " + error.what());
  }
}

Server::~Server() {
  if (::getpid() == process_) {
    stop();
  } else {
    // The child of a fork has none of the threads, which can't be joined or detached there.
    [[maybe_unused]] const auto* left = new std::vector<std::thread>(std::move(threads_));
  }
}

void Server::stop() {
  stopped_.store(true);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
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
    try {
      admit(std::move(socket));
    } catch (const std::exception&) {  // such as no memory: this reader's problem alone
    }
  }
  arm(listening_.get(), EPOLLIN | EPOLLONESHOT, true);
}

void Server::admit(Descriptor socket) {
  auto connection = std::make_unique<Connection>();
  connection->nonce = random_nonce();
  connection->send_later(Challenge{kServerMagic, kVersion, 0, connection->nonce});
  const int descriptor = socket.get();
  connection->socket = std::move(socket);
  {
    const std::lock_guard lock(mutex_);
    if (connections_.size() >= kMostConnections) return;
    connections_[descriptor] = std::move(connection);
  }
  arm(descriptor, EPOLLOUT | EPOLLONESHOT, false);
}

void Server::serve(Connection& connection) {
  const int descriptor = connection.socket.get();
  {
    const std::lock_guard lock(connection.turn);
    Step step = Step::kNext;
    for (int i = 0; i < kTurn && step == Step::kNext; ++i) step = turn(connection);
    const bool sends = step != Step::kReceive;  // the last answer is left, too
    connection.waited_for.store(!connection.welcomed.load() || sends);
    if (step != Step::kEnd) {
      const std::uint32_t events = sends ? EPOLLOUT : EPOLLIN;
      return arm(descriptor, events | EPOLLONESHOT, true);
    }
  }
  forget(descriptor);
}

// Sends what is left to send, and receives one message.
Step Server::turn(Connection& connection) {
  if (const Step step = connection.flush(bytes_); step != Step::kNext) return step;
  if (connection.last) return Step::kEnd;
  Step step;
  if (connection.welcomed.load()) {
    Request request{};
    step = connection.receive(request);
    if (step == Step::kNext) answer(connection, request);
  } else {
    Hello hello{};
    step = connection.receive(hello);
    if (step == Step::kNext) welcome(connection, hello);
  }
  return step;
}

void Server::welcome(Connection& connection, const Hello& hello) {
  const PackId& id = folder_->index().id();
  connection.last = true;
  if (hello.magic != kReaderMagic) return;
  Welcome welcome{Status::kOk, folder_->index().partitions(), 0};
  if (hello.version != kVersion) {
    welcome = {Status::kOtherVersion, 0, 0};
  } else if (hello.id != id) {
    welcome = {Status::kOtherPack, 0, 0};
  } else if (hello.proof != proof_of(secret_, Side::kReader, connection.nonce, hello.nonce, id)) {
    welcome = {Status::kOtherSecret, 0, 0};
  } else {
    welcome.proof = proof_of(secret_, Side::kServer, connection.nonce, hello.nonce, id);
    connection.welcomed.store(true);
    connection.last = false;
  }
  connection.send_later(welcome);
  if (connection.last) return;
  connection.head.insert(connection.head.end(), bits_.begin(), bits_.end());
}

void Server::answer(Connection& connection, const Request& request) {
  const Index& index = folder_->index();
  requests_.fetch_add(1);
  const auto refuse = [&](Status status) { connection.send_later(Answer{status, 0, 0}); };
  const Entry* entry = request.entry < index.size() ? &index.entry(request.entry) : nullptr;
  if (entry == nullptr || entry->kind != EntryKind::kFile || request.offset > entry->stored_size ||
      request.size > entry->stored_size - request.offset ||
      entry->partition >= index.partitions()) {
    return refuse(Status::kBadRequest);
  }
  const std::uint32_t partition = entry->partition;
  if ((bits_[partition / 8] & (std::byte{1} << (partition % 8))) == std::byte{0}) {
    return refuse(Status::kNotHere);
  }
  // The size of the partition's file was compared with the index when it was opened.
  const std::uint64_t size = index.partition_size(partition);
  if (entry->offset > size || entry->stored_size > size - entry->offset) {
    return refuse(Status::kBadRequest);
  }
  connection.send_later(Answer{Status::kOk, 0, request.size});
  connection.file = folder_->partition_fd(partition);
  connection.offset = static_cast<off_t>(entry->offset + request.offset);
  connection.left = request.size;
  connection.moved.store(now());
}

void Server::forget(int descriptor) {
  // Closed under the lock: the next connection may get the same number.
  const std::lock_guard lock(mutex_);
  connections_.erase(descriptor);
}

// Disconnects readers that say no hello, or take nothing of what is sent to them.
void Server::drop_late() {
  const std::int64_t second = now();
  if (swept_.exchange(second) == second) return;
  const std::lock_guard lock(mutex_);
  for (const auto& [descriptor, connection] : connections_) {
    const std::int64_t limit = connection->welcomed.load() ? kStallSeconds : kHelloSeconds;
    if (connection->waited_for.load() && second - connection->moved.load() > limit) {
      ::shutdown(descriptor, SHUT_RDWR);  // its thread closes it
    }
  }
}

}  // namespace pydist::packs

#else

namespace pydist::packs {

Server::Server(std::shared_ptr<const Folder> folder, const std::string&, const Secret&, int) {
  throw PackError(folder->path() + ": packs are served on Linux alone");
}

Server::~Server() = default;

}  // namespace pydist::packs

#endif
