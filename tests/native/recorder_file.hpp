// Memory that threads and processes of one machine share; see driver_recorder.cpp.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

namespace recorder {

// A file without a name, which others open through /proc while its maker has it open: none is left
// behind, however a process ends. A mapping outlives it.
class File {
 public:
  File() = default;
  File(File&& other) noexcept { *this = std::move(other); }
  File& operator=(File&& other) noexcept {
    std::swap(number_, other.number_);
    std::swap(name_, other.name_);
    return *this;
  }
  ~File() {
    if (number_ >= 0) close(number_);
  }
  explicit operator bool() const { return number_ >= 0; }

  static File make(std::size_t bytes) {
    File made;
#ifdef __linux__
    made.number_ = memfd_create("recorder", MFD_CLOEXEC);
    const std::string place = "/proc/" + std::to_string(getpid()) + "/fd/";
#else  // threads alone find it
    char path[] = "/tmp/recorderXXXXXX";
    made.number_ = mkstemp(path);
    unlink(path);
    const std::string place = "/dev/fd/";
#endif
    if (made && ftruncate(made.number_, static_cast<off_t>(bytes)) != 0) made = File();
    if (made) {
      made.name_ =
          place + std::to_string(made.number_) + " " + std::to_string(made.status().st_ino);
    }
    return made;
  }

  // What has that name; false if it is closed. The number that it had may be another file's by now,
  // its inode is not.
  static File open(const std::string& name) {
    File opened;
    char path[64];
    unsigned long long inode = 0;
    if (std::sscanf(name.c_str(), "%63s %llu", path, &inode) != 2) return opened;
    opened.number_ = ::open(path, O_RDWR | O_CLOEXEC);
    opened.name_ = name;
    if (opened && opened.status().st_ino != inode) opened = File();
    return opened;
  }

  const std::string& name() const { return name_; }
  std::size_t bytes() const { return static_cast<std::size_t>(status().st_size); }

  std::byte* map() const {
    void* start = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, number_, 0);
    return start == MAP_FAILED ? nullptr : static_cast<std::byte*>(start);
  }

  bool write(std::size_t place, const void* data, std::size_t count) const {
    return whole(pwrite, place, static_cast<const std::byte*>(data), count);
  }
  bool read(std::size_t place, void* data, std::size_t count) const {
    return whole(pread, place, static_cast<std::byte*>(data), count);
  }

 private:
  struct stat status() const {
    struct stat found{};
    fstat(number_, &found);
    return found;
  }

  // One call moves 2 GiB at most.
  template <class Move, class Data>
  bool whole(Move move, std::size_t place, Data* data, std::size_t count) const {
    while (count > 0) {
      const auto moved = move(number_, data, count, static_cast<off_t>(place));
      if (moved <= 0) return false;
      place += static_cast<std::size_t>(moved);
      data += moved;
      count -= static_cast<std::size_t>(moved);
    }
    return true;
  }

  int number_ = -1;
  std::string name_;
};

}  // namespace recorder
