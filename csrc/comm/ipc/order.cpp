// Notes that reveal whether two ranks start their exchanges in different orders.
//
// Each rank has a page of notes in an anonymous file, which its peers map through /proc. Where that
// is impossible (another namespace, another system) the orders are not compared, and exchanges work
// nevertheless.
#include "comm/ipc/order.hpp"

#include <random>
#include <string>
#include <utility>

#if defined(__linux__)  // other systems have no CUDA IPC
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace pydist::comm {
namespace {

#if defined(__linux__)

// The memory of an open file, null if that fails.
std::uint64_t* map_file(int file, std::size_t bytes, int protection) {
  void* address = mmap(nullptr, bytes, protection, MAP_SHARED, file, 0);
  return address == MAP_FAILED ? nullptr : static_cast<std::uint64_t*>(address);
}

// A file without a name, which ends with its last process.
std::pair<int, std::uint64_t*> make_notes(std::size_t bytes) {
  const int file = memfd_create("pydist order", MFD_CLOEXEC);
  if (file < 0) return {-1, nullptr};
  std::uint64_t* notes = nullptr;
  if (ftruncate(file, static_cast<off_t>(bytes)) == 0) {
    notes = map_file(file, bytes, PROT_READ | PROT_WRITE);
  }
  if (notes != nullptr) return {file, notes};
  close(file);
  return {-1, nullptr};
}

const std::uint64_t* open_notes(const IpcNotesFile& place, std::size_t bytes) {
  const std::string path =
      "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.file);
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return nullptr;
  // In a container the process id may belong to another process, whose file has another size.
  struct stat about = {};
  const std::uint64_t* notes = nullptr;
  if (fstat(file, &about) == 0 && about.st_size == static_cast<off_t>(bytes)) {
    notes = map_file(file, bytes, PROT_READ);
  }
  close(file);
  return notes;
}

void unmap(const std::uint64_t* notes, std::size_t bytes) {
  munmap(const_cast<std::uint64_t*>(notes), bytes);
}

int own_process() { return static_cast<int>(getpid()); }
void close_file(int file) { close(file); }

#else

std::pair<int, std::uint64_t*> make_notes(std::size_t) { return {-1, nullptr}; }
const std::uint64_t* open_notes(const IpcNotesFile&, std::size_t) { return nullptr; }
void unmap(const std::uint64_t*, std::size_t) {}
int own_process() { return 0; }
void close_file(int) {}

#endif

// Sequentially consistent, between processes: builtins of GCC and Clang, as libc++ came late to
// std::atomic_ref.
std::uint64_t read(const std::uint64_t* note) { return __atomic_load_n(note, __ATOMIC_SEQ_CST); }
void write(std::uint64_t* note, std::uint64_t value) {
  __atomic_store_n(note, value, __ATOMIC_SEQ_CST);
}

}  // namespace

IpcOrder::IpcOrder(int rank, int size)
    : rank_(static_cast<std::size_t>(rank)), size_(static_cast<std::size_t>(size)) {
  const auto [file, notes] = make_notes(bytes());
  if (notes == nullptr) return;
  std::random_device random;
  notes_ = notes;
  place_ = {own_process(), file, std::uint64_t{random()} << 32 | random()};
  write(notes_, place_.key);
}

IpcOrder::~IpcOrder() {
  for (const auto& [peer, notes] : of_peers_) {
    if (notes != nullptr) unmap(notes, bytes());
  }
  if (notes_ == nullptr) return;
  unmap(notes_, bytes());
  close_file(place_.file);
}

std::uint32_t IpcOrder::new_channel() {
  const std::lock_guard lock(mutex_);
  return ++channels_;
}

void IpcOrder::meet(int peer, const IpcNotesFile& place) {
  const std::lock_guard lock(mutex_);
  if (place.file < 0 || notes_ == nullptr || of_peers_.contains(peer)) return;
  const std::uint64_t* notes = open_notes(place, bytes());
  if (notes != nullptr && read(notes) != place.key) {
    unmap(notes, bytes());
    notes = nullptr;
  }
  of_peers_[peer] = notes;
}

bool IpcOrder::note(int peer, std::uint32_t own, std::uint32_t other) {
  const std::lock_guard lock(mutex_);
  const std::uint32_t number = ++started_[peer];
  if (notes_ == nullptr) return true;
  const std::size_t slot = 1 + number % kKept, row = static_cast<std::size_t>(peer);
  // Write, then read, both sequentially consistent: of two ranks that do this at the same time, at
  // least one sees the other's note.
  write(notes_ + slot + row * kKept, std::uint64_t{number} << 32 | own);
  const auto found = of_peers_.find(peer);
  if (found == of_peers_.end() || found->second == nullptr) return true;
  const std::uint64_t there = read(found->second + slot + rank_ * kKept);
  return there >> 32 != number || static_cast<std::uint32_t>(there) == other;
}

std::size_t IpcOrder::bytes() const { return (1 + size_ * kKept) * sizeof(std::uint64_t); }

}  // namespace pydist::comm
