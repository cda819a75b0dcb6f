// Serves the partitions that this node has to readers on other nodes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "packs/folder.hpp"
#include "packs/protocol.hpp"
#include "packs/system.hpp"

namespace pydist::packs {

struct Connection;
enum class Step;

// A pool of threads that answers requests from one epoll set, by sendfile. Each request names an
// entry and a range of its stored bytes, which are checked against the index; a reader that does
// not prove that it knows the secret, or that breaks the protocol, is disconnected. No thread
// waits for a reader: what a socket does not take is sent when it does. Linux alone.
class Server {
 public:
  // Serves from now on, until the process that made it destroys it. address: see sockets.hpp.
  // threads: at least 1 is started. Throws PackError if the folder has none of its partitions, or
  // one whose header is damaged, or if the address can't be used, or not so many threads can be
  // started.
  Server(std::shared_ptr<const Folder> folder, const std::string& address, const Secret& secret,
         int threads);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  const std::string& address() const { return address_; }  // with the port
  std::uint32_t partitions() const { return here_; }       // those on this node

  // Since the start, from any thread: the requests that arrived, refused ones included, and the
  // bytes of files that the sockets of readers have taken.
  std::uint64_t requests() const { return requests_.load(); }
  std::uint64_t bytes() const { return bytes_.load(); }

 private:
  // Ends and joins the threads; removes a Unix socket's file.
  void stop();
  // The loop of each thread: one event of epoll, then its work. All sockets are armed for one event
  // (EPOLLONESHOT), so no other thread gets the same one before it is armed again.
  void work();
  void accept_all();
  void admit(Descriptor socket);
  // Goes on with a connection until it must wait, has had its turn, or ends.
  void serve(Connection& connection);
  Step turn(Connection& connection);
  // Put the answer to a message into what the connection sends.
  void welcome(Connection& connection, const Hello& hello);
  void answer(Connection& connection, const Request& request);
  // Waits for events of a socket. added: it is in the epoll set already.
  void arm(int descriptor, std::uint32_t events, bool added);
  // Closes a connection.
  void forget(int descriptor);
  void drop_late();

  std::shared_ptr<const Folder> folder_;
  Secret secret_;
  std::string address_;
  std::vector<std::byte> bits_;  // the partitions that are here, as they are sent (protocol.hpp)
  std::uint32_t here_ = 0;
  std::atomic<std::uint64_t> requests_{0}, bytes_{0};
  std::atomic<bool> stopped_{false};
  std::atomic<std::int64_t> swept_{0};   // when drop_late last ran, in steady seconds
  Descriptor listening_, epoll_, wake_;  // wake_: an eventfd that becomes readable with stop()
  const pid_t process_ = ::getpid();     // in the child of a fork there are no threads to join
  std::mutex mutex_;                     // of the map of connections, by descriptor
  std::unordered_map<int, std::unique_ptr<Connection>> connections_;
  std::vector<std::thread> threads_;
};

}  // namespace pydist::packs
