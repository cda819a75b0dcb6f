// Reads the settings of the mount, and opens its pack.
#include "preload/mount.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "core/published.hpp"

namespace pydist::preload {
namespace {

constexpr std::uint64_t kLarge = std::uint64_t{16} << 20;

std::atomic<const Mount*> settings{nullptr};
std::atomic<const packs::Folder*> opened{nullptr};
std::atomic<bool> reported{false};
std::atomic<pid_t> owner{0};  // of the memory; 0 before it is known

__attribute__((constructor)) void know_owner() {
  owner = getpid();
  pthread_atfork(nullptr, nullptr, [] { owner = getpid(); });
}

std::string text(const char* value) { return value == nullptr ? "" : value; }

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  for (std::size_t start = 0; start < list.size();) {
    const std::size_t end = std::min(list.find(',', start), list.size());
    if (end > start) parts.push_back(list.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

// The bytes that hexadecimal digits stand for; zeros where there are none.
packs::Secret secret_of(const std::string& digits) {
  packs::Secret secret{};
  for (std::size_t i = 0; i < secret.size() && 2 * i + 1 < digits.size(); ++i)
    secret[i] = static_cast<std::byte>(std::strtoul(digits.substr(2 * i, 2).c_str(), nullptr, 16));
  return secret;
}

std::unique_ptr<Mount> read_settings() {
  auto made = std::make_unique<Mount>();
  made->path = text(std::getenv("PYDIST_MOUNT"));
  if (made->path.empty()) return made;
  made->packs = text(std::getenv("PYDIST_MOUNT_PACKS"));
  made->folders = text(std::getenv("PYDIST_MOUNT_FOLDERS"));
  made->servers = split(text(std::getenv("PYDIST_MOUNT_SERVERS")));
  made->secret = secret_of(text(std::getenv("PYDIST_MOUNT_SECRET")));
  const std::string large = text(std::getenv("PYDIST_MOUNT_LARGE"));
  made->large = large.empty() ? kLarge : std::strtoull(large.c_str(), nullptr, 10);
  made->cache = std::strtoull(text(std::getenv("PYDIST_MOUNT_CACHE")).c_str(), nullptr, 10);
  made->parents = made->folders + "/parents";
  made->existing = made->path.rfind('/');
  while (made->existing > 0 && !made->packs.empty() &&
         ::access(made->path.substr(0, made->existing).c_str(), F_OK) != 0)
    made->existing = made->path.rfind('/', made->existing - 1);
  made->identity = made->folders.substr(made->folders.rfind('/') + 1);
  const std::string output = text(std::getenv("PYDIST_MOUNT_OUTPUT"));  // NAME=FOLDER
  if (const std::size_t equals = output.find('='); equals != std::string::npos) {
    made->output = output.substr(0, equals);
    made->output_target = output.substr(equals + 1);
  }
  return made;
}

std::unique_ptr<packs::Folder> open_folder(const Mount& from) {
  if (from.servers.empty()) return std::make_unique<packs::Folder>(from.packs);
  return std::make_unique<packs::Folder>(from.packs, from.servers, from.secret);
}

}  // namespace

const Mount& mount() {
  return published(settings, [] {
    const Inside inside;
    return read_settings();
  });
}

const packs::Folder& pack() {
  if (Apart* apart = Apart::current()) return apart->folder();
  return published(opened, [] { return open_folder(mount()); });
}

bool has_memory_of_parent() { return owner != 0 && owner != getpid(); }

Apart::Apart() : before_(innermost) {
  if (has_memory_of_parent()) innermost = this;
}

Apart::~Apart() { innermost = before_; }

const packs::Folder& Apart::folder() {
  if (folder_ == nullptr) folder_ = open_folder(mount());
  return *folder_;
}

void report(const char* reason) noexcept {
  if (reported.exchange(true)) return;  // a program may repeat a call that fails
  const std::string_view parts[] = {"pydist: ", reason, "\n"};
  for (const std::string_view part : parts) {
    if (::write(STDERR_FILENO, part.data(), part.size()) < 0) return;
  }
}

}  // namespace pydist::preload
