// Partitions read from servers: the same bytes as from the folder, and no trust in either side.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <random>
#include <thread>

#include "packs/codec.hpp"
#include "packs/remote.hpp"
#include "packs/server.hpp"
#include "packs/sockets.hpp"
#include "packs_files.hpp"

#if defined(__linux__)

namespace pydist::packs {
namespace {

constexpr Secret kSecret{std::byte{1}, std::byte{2}, std::byte{3}};

// A pack whose partitions are served from one folder, and whose index alone is in another.
class Served : public testing::TestWithParam<Codec> {
 protected:
  void SetUp() override {
    write_sample(all_, GetParam());
    std::filesystem::copy_file(all_ / kIndexName, index_ / kIndexName);
    socket_ = index_ / "socket";
  }
  std::unique_ptr<Server> serve(const std::string& address, int threads = 2) {
    return std::make_unique<Server>(std::make_shared<Folder>(all_.path()), address, kSecret,
                                    threads);
  }
  static void expect_all(const Folder& folder) {
    for (const auto& [path, bytes] : sample_files()) {
      EXPECT_EQ(content_of(folder, folder.index().find(path).value()), bytes) << path;
    }
  }
  // Returns the error of reading a file of partition `partition`.
  static std::string refusal(const Folder& folder, const char* path = "train/cats/1.jpg") {
    try {
      content_of(folder, folder.index().find(path).value());
    } catch (const PackError& error) {
      return error.what();
    }
    return "";
  }
  TemporaryFolder all_, index_;
  std::string socket_;
};

TEST_P(Served, FilesAreThoseOfTheFolder) {
  for (const std::string& asked : {socket_, std::string("127.0.0.1:0")}) {
    const auto server = serve(asked);
    const Folder folder(index_.path(), {server->address()}, kSecret);
    expect_all(folder);
    for (const auto& [path, bytes] : sample_files()) {
      const std::uint32_t entry = folder.index().find(path).value();
      folder.check(entry);
      if (folder.index().entry(entry).codec != Codec::kRaw || bytes.size() < 3) continue;
      std::vector<std::byte> part(2);
      EXPECT_EQ(folder.pread(entry, 1, part), 2u);
      EXPECT_EQ(text_of(part), bytes.substr(1, 2));
    }
    EXPECT_EQ(server->partitions(), 2u);
    EXPECT_FALSE(folder.is_here(0));
    EXPECT_THROW(folder.partition_fd(0), PackError);
  }
  EXPECT_FALSE(std::filesystem::exists(socket_));
}

TEST_P(Served, AFileIsOneRequest) {
  const auto server = serve(socket_);
  const Folder folder(index_.path(), {socket_}, kSecret);
  std::uint64_t asked = 0;
  for (int again = 0; again < 3; ++again) {
    for (const auto& [path, bytes] : sample_files()) {
      const std::uint32_t entry = folder.index().find(path).value();
      EXPECT_EQ(content_of(folder, entry), bytes) << path;
      if (!bytes.empty()) ++asked;
      EXPECT_EQ(server->requests(), asked) << path;
      // The index, which each node has, answers these.
      EXPECT_EQ(folder.file(entry).raw_size, bytes.size());
      EXPECT_GE(folder.index().files(0).size(), 5u);
      EXPECT_EQ(server->requests(), asked);
    }
  }
}

TEST_P(Served, ManyThreadsAndForksReadAtOnce) {
  const auto server = serve(socket_, 3);
  const Folder folder(index_.path(), {socket_}, kSecret);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) expect_all(folder);
    });
  }
  for (std::thread& thread : threads) thread.join();
  // A fork's child must not use its parent's connections: both read at the same time.
  const pid_t child = ::fork();
  for (int i = 0; i < 50; ++i) expect_all(folder);
  if (child == 0) ::_exit(HasFailure() ? 1 : 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// It has a copy of the server, and none of its threads.
TEST_P(Served, AChildOfAForkLeavesTheServerToItsParent) {
  auto server = serve(socket_);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    server.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  expect_all(Folder(index_.path(), {socket_}, kSecret));
}

INSTANTIATE_TEST_SUITE_P(Codecs, Served, testing::Values(Codec::kRaw, Codec::kZstd),
                         [](const auto& tested) { return name_of(tested.param); });

using ServedRaw = Served;
INSTANTIATE_TEST_SUITE_P(Raw, ServedRaw, testing::Values(Codec::kRaw),
                         [](const auto&) { return "raw"; });

TEST_P(ServedRaw, EachServerHasItsPartitions) {
  const TemporaryFolder first, second;
  for (const auto* folder : {&first, &second}) {
    std::filesystem::copy_file(all_ / kIndexName, *folder / kIndexName);
  }
  std::filesystem::copy_file(all_ / partition_name(0), first / partition_name(0));
  std::filesystem::copy_file(all_ / partition_name(1), second / partition_name(1));
  Server one(std::make_shared<Folder>(first.path()), first / "s", kSecret, 1);
  auto two =
      std::make_unique<Server>(std::make_shared<Folder>(second.path()), second / "s", kSecret, 1);
  const Folder folder(index_.path(), {first / "s", second / "s"}, kSecret);
  expect_all(folder);
  // With the first partition here, only the other one is asked for.
  const std::uint64_t before = one.requests();
  expect_all(Folder(first.path(), {first / "s", second / "s"}, kSecret));
  EXPECT_EQ(one.requests(), before);
  two.reset();
  EXPECT_NE(refusal(folder, "a.txt").find("part-00001.pack: not on this node, and no server"),
            std::string::npos)
      << refusal(folder, "a.txt");
  // A server that comes back is used again.
  two = std::make_unique<Server>(std::make_shared<Folder>(second.path()), second / "s", kSecret, 1);
  expect_all(folder);
}

TEST_P(ServedRaw, OthersAreRefusedWithAReason) {
  const auto server = serve(socket_);
  EXPECT_NE(refusal(Folder(index_.path(), {socket_}, Secret{})).find("another secret"),
            std::string::npos);
  const TemporaryFolder other;
  write_sample(other, Codec::kRaw, test_id(99));
  std::filesystem::remove(other / partition_name(0));
  std::filesystem::remove(other / partition_name(1));
  EXPECT_NE(refusal(Folder(other.path(), {socket_}, kSecret)).find("another pack"),
            std::string::npos);
  EXPECT_NE(refusal(Folder(index_.path(), {index_ / "none"}, kSecret)).find("No such file"),
            std::string::npos);
  EXPECT_NE(refusal(Folder(index_.path(), {"nonsense"}, kSecret)).find("HOST:PORT"),
            std::string::npos);
  EXPECT_NE(refusal(Folder(index_.path())).find("part-00001.pack: No such file"),
            std::string::npos);
  EXPECT_THROW(Server(std::make_shared<Folder>(index_.path()), index_ / "t", kSecret, 1),
               PackError);
  expect_all(Folder(index_.path(), {socket_}, kSecret));
}

// Speaks with a server by hand.
class Speaker {
 public:
  explicit Speaker(const std::string& address) : socket_(connect_to(address)) {
    receive_value(socket_.get(), challenge_);
  }
  Hello hello() const {
    Hello hello{kReaderMagic, kVersion, 0, test_id(), random_nonce(), 0};
    hello.proof = proof_of(kSecret, Side::kReader, challenge_.nonce, hello.nonce, test_id());
    return hello;
  }
  bool enter() {
    Welcome welcome{};
    std::byte bits{};
    return send_value(socket_.get(), hello()) && receive_value(socket_.get(), welcome) &&
           receive_value(socket_.get(), bits) && welcome.status == Status::kOk;
  }
  std::optional<Answer> ask(const Request& request) {
    Answer answer{};
    if (!send_value(socket_.get(), request) || !receive_value(socket_.get(), answer)) return {};
    return answer;
  }
  int socket() const { return socket_.get(); }

 private:
  Descriptor socket_;
  Challenge challenge_{};
};

TEST_P(ServedRaw, RequestsAreCheckedAgainstTheIndex) {
  const auto server = serve(socket_);
  const Folder folder(all_.path());
  const std::uint32_t file = folder.index().find("train/cats/1.jpg").value();
  const std::uint32_t last = folder.index().size();
  constexpr std::uint64_t kMost = ~std::uint64_t{0};
  Speaker speaker(socket_);
  ASSERT_TRUE(speaker.enter());
  for (const Request& bad : std::initializer_list<Request>{{last, 0, 0, 1},
                                                           {0, 0, 0, 1},
                                                           {file, 0, 0, 5001},
                                                           {file, 0, 5001, 0},
                                                           {file, 0, kMost, 2},
                                                           {file, 0, 1, kMost},
                                                           {0xFFFFFFFF, 0, 0, 0}}) {
    const auto answer = speaker.ask(bad);
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->status, Status::kBadRequest);
    EXPECT_EQ(answer->size, 0u);
  }
  const auto answer = speaker.ask({file, 0, 4999, 1});
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->status, Status::kOk);
  std::byte x{};
  EXPECT_TRUE(receive_value(speaker.socket(), x));
  EXPECT_EQ(x, std::byte{'x'});
}

// Without the proof nothing is sent but the challenge and a refusal, whatever comes.
TEST_P(ServedRaw, StrangersGetNothing) {
  const auto server = serve(socket_);
  std::minstd_rand random(5);
  int entered = 0;
  for (int i = 0; i < 1'000; ++i) {
    Speaker speaker(socket_);
    const Hello hello = speaker.hello();
    std::string bytes(reinterpret_cast<const char*>(&hello), sizeof(hello));
    if (i % 3 == 0) {
      for (char& byte : bytes) byte = static_cast<char>(random());
    } else {
      const std::size_t at = random() % bytes.size();
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << (random() % 8)));
    }
    if (i % 7 == 0) bytes.resize(random() % bytes.size());
    send_all(speaker.socket(), bytes_of(bytes));
    ::shutdown(speaker.socket(), SHUT_WR);
    Welcome welcome{};
    const bool answered = receive_value(speaker.socket(), welcome);
    entered += answered && welcome.status == Status::kOk;
  }
  // The field of zeros is not covered by the proof: 4 of 56 bytes.
  EXPECT_LT(entered, 100);
  EXPECT_EQ(server->requests(), 0u);
  expect_all(Folder(index_.path(), {socket_}, kSecret));
}

TEST_P(ServedRaw, ReadersMaySpeakInPiecesHangUpOrTakeNothing) {
  const auto server = serve(socket_, 1);
  const std::uint32_t file = Folder(all_.path()).index().find("train/cats/1.jpg").value();
  Speaker slow(socket_);
  ASSERT_TRUE(slow.enter());
  const Request request{file, 0, 0, 1};
  const std::string bytes(reinterpret_cast<const char*>(&request), sizeof(request));
  for (const char& byte : bytes.substr(0, 20)) send_all(slow.socket(), bytes_of({&byte, 1}));
  for (int i = 0; i < 200; ++i) {
    Speaker gone(socket_);
    ASSERT_TRUE(gone.enter());
    for (int k = 0; k < 50; ++k) send_value(gone.socket(), Request{file, 0, 0, 5000});
  }
  // More readers than threads ask for more than their sockets take, and take nothing of it.
  std::vector<std::unique_ptr<Speaker>> stuck;
  for (int i = 0; i < 4; ++i) {
    stuck.push_back(std::make_unique<Speaker>(socket_));
    ASSERT_TRUE(stuck.back()->enter());
    const Request all{file, 0, 0, 5000};
    while (::send(stuck.back()->socket(), &all, sizeof(all), MSG_DONTWAIT) > 0) continue;
  }
  ::shutdown(stuck.back()->socket(), SHUT_WR);
  expect_all(Folder(index_.path(), {socket_}, kSecret));
  send_all(slow.socket(), bytes_of(bytes.substr(20)));
  Answer answer{};
  EXPECT_TRUE(receive_value(slow.socket(), answer));
  EXPECT_EQ(answer.status, Status::kOk);
}

// However many requests come at once, each has its answer without a further one.
TEST_P(ServedRaw, RequestsMayComeManyAtOnce) {
  const auto server = serve(socket_, 1);
  const std::uint32_t file = Folder(all_.path()).index().find("train/cats/1.jpg").value();
  Speaker reader(socket_);
  ASSERT_TRUE(reader.enter());
  for (std::size_t count = 1; count <= 130; ++count) {
    const std::vector<Request> requests(count, Request{file, 0, 0, 1});
    ASSERT_TRUE(send_all(reader.socket(), std::as_bytes(std::span(requests))));
    for (std::size_t i = 0; i < count; ++i) {
      Answer answer{};
      std::byte content{};
      ASSERT_TRUE(receive_value(reader.socket(), answer)) << i << " of " << count;
      ASSERT_EQ(answer.status, Status::kOk);
      ASSERT_TRUE(receive_value(reader.socket(), content));
    }
  }
}

// A server that knows the secret and sends anything: reads are right or refused.
TEST_P(ServedRaw, ServersAreNotTrusted) {
  const Descriptor listening = listen_at(socket_);
  std::atomic<bool> stopped = false;
  std::thread hostile([&] {
    std::minstd_rand random(6);
    for (;;) {
      const Descriptor reader(::accept(listening.get(), nullptr, nullptr));
      if (stopped.load() || reader.get() < 0) return;
      std::string said;
      const auto say = [&](const auto& value) {
        said.append(reinterpret_cast<const char*>(&value), sizeof(value));
        if (random() % 4 == 0) said[random() % said.size()] ^= static_cast<char>(random());
        send_all(reader.get(), bytes_of(said));
        said.clear();
      };
      const Challenge challenge{kServerMagic, kVersion, 0, random_nonce()};
      say(challenge);
      Hello hello{};
      if (!receive_value(reader.get(), hello)) continue;
      Welcome welcome{Status::kOk, 2, 0};
      welcome.proof = proof_of(kSecret, Side::kServer, challenge.nonce, hello.nonce, hello.id);
      say(welcome);
      say(std::byte{3});
      Request request{};
      if (!receive_value(reader.get(), request)) continue;
      say(Answer{Status::kOk, 0, request.size});
      send_all(reader.get(), std::vector<std::byte>(random() % 6000, std::byte{'x'}));
    }
  });
  int right = 0, refused = 0;
  for (int i = 0; i < 500; ++i) {
    const Folder folder(index_.path(), {socket_}, kSecret);
    const std::string reason = refusal(folder);
    ++(reason.empty() ? right : refused);
  }
  EXPECT_GT(right, 10);
  EXPECT_GT(refused, 100);
  stopped.store(true);
  connect_to(socket_);
  hostile.join();
}

TEST(Siphash, MatchesThePublishedValues) {
  Secret key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(i);
  std::vector<std::byte> bytes;
  // The first of the vectors of the authors' reference, for inputs 00 01 02 ... of 0 to 15 bytes.
  EXPECT_EQ(siphash(key, bytes), 0x726fdb47dd0e0e31u);
  for (int i = 0; i < 15; ++i) bytes.push_back(static_cast<std::byte>(i));
  EXPECT_EQ(siphash(key, bytes), 0xa129ca6149be45e5u);
}

}  // namespace
}  // namespace pydist::packs

#endif
