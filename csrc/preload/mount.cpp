// Reads the settings of the mount, and opens its pack.
#include "preload/mount.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/published.hpp"
#include "preload/paths.hpp"

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

std::string_view setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::uint64_t number(std::string_view digits, std::uint64_t otherwise) {
  std::from_chars(digits.data(), digits.data() + digits.size(), otherwise);
  return otherwise;
}

std::vector<std::string> split(std::string_view list) {
  std::vector<std::string> parts;
  for (std::size_t start = 0; start < list.size();) {
    const std::size_t end = std::min(list.find(',', start), list.size());
    if (end > start) parts.emplace_back(list.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

// The bytes that hexadecimal digits stand for; zeros where there are none.
packs::Secret secret_of(std::string_view digits) {
  packs::Secret secret{};
  for (std::size_t i = 0; i < secret.size() && 2 * i + 1 < digits.size(); ++i) {
    unsigned value = 0;
    std::from_chars(digits.data() + 2 * i, digits.data() + 2 * i + 2, value, 16);
    secret[i] = static_cast<std::byte>(value);
  }
  return secret;
}

// Bytes of the path of the deepest folder above a path that exists.
std::size_t existing_parent(std::string_view path) {
  char parent[kPathSize];
  std::size_t size = std::min(path.size(), sizeof parent - 1);
  std::memcpy(parent, path.data(), size);
  do {
    while (size > 0 && parent[--size] != '/') continue;
    parent[size] = 0;
  } while (size > 0 && ::access(parent, F_OK) != 0);
  return size;
}

constinit const Mount kNone;

// Reads the environment into pages that are never freed: some programs overwrite the environment.
const Mount* read_settings() {
  constexpr std::string_view kParents = "/parents";
  const std::string_view path = setting("PYDIST_MOUNT"), packs = setting("PYDIST_MOUNT_PACKS"),
                         folders = setting("PYDIST_MOUNT_FOLDERS"),
                         servers = setting("PYDIST_MOUNT_SERVERS"),
                         output = setting("PYDIST_MOUNT_OUTPUT");  // NAME=FOLDER
  if (path.empty()) return &kNone;
  const std::size_t size = path.size() + packs.size() + 2 * folders.size() + kParents.size() +
                           servers.size() + output.size() + 6;  // null bytes
  void* pages = mmap(nullptr, sizeof(Mount) + size, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  auto* const made = new (pages) Mount;
  char* next = reinterpret_cast<char*>(made + 1);
  const auto keep = [&](std::string_view start, std::string_view end = {}) {
    char* const text = next;
    next = std::copy(end.begin(), end.end(), std::copy(start.begin(), start.end(), text)) + 1;
    return std::string_view(text, start.size() + end.size());
  };
  made->path = keep(path);
  made->packs = keep(packs);
  made->folders = keep(folders);
  made->parents = keep(folders, kParents);
  made->servers = keep(servers);
  made->existing = packs.empty() ? path.rfind('/') : existing_parent(path);
  made->identity = made->folders.substr(made->folders.rfind('/') + 1);
  if (const std::size_t equals = output.find('='); equals != std::string_view::npos) {
    const std::string_view kept = keep(output);
    made->output = kept.substr(0, equals);
    made->output_target = kept.substr(equals + 1);
  }
  made->secret = secret_of(setting("PYDIST_MOUNT_SECRET"));
  made->large = number(setting("PYDIST_MOUNT_LARGE"), kLarge);
  made->cache = number(setting("PYDIST_MOUNT_CACHE"), 0);
  return made;
}

std::unique_ptr<packs::Folder> open_folder(const Mount& from) {
  return std::make_unique<packs::Folder>(std::string(from.packs), split(from.servers), from.secret);
}

}  // namespace

const Mount& mount() {
  const Mount* known = settings.load(std::memory_order_acquire);
  if (known != nullptr) return *known;
  const Inside inside;
  const Mount* made = read_settings();
  // Threads that read them at the same time have the same ones; those that come second are left.
  return settings.compare_exchange_strong(known, made) ? *made : *known;
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
