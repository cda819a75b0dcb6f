// The NCCL library, found and opened at run time: nothing links to it.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/nccl_abi.hpp"

namespace pydist::comm {

// A library can't be opened, is too old or lacks a symbol. Python sees NotSupported.
class LibraryMissing : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A shared library, open for as long as the process lives: what it started must not be unmapped.
class DynamicLibrary {
 public:
  // Opens the first of `paths` (or plain names) that can be opened.
  // loaded: a name of which a copy that the process has already is taken before; empty for none.
  // what: how messages call it.
  DynamicLibrary(std::string what, const std::string& loaded,
                 const std::vector<std::string>& paths);

  const std::string& path() const { return path_; }

  // Finds a function by name; LibraryMissing names the library and the symbol.
  template <class Function>
  void find(const char* symbol, Function*& function) const {
    function = reinterpret_cast<Function*>(address(symbol));
  }

 private:
  void* address(const char* symbol) const;

  std::string what_, path_;
  void* handle_ = nullptr;
};

// The entry points of NCCL that pydist calls.
class NcclLibrary {
 public:
  // The first version with ncclCommInitRankConfig, and so with communicators that do not block.
  static constexpr int kOldest = nccl_version(2, 14, 0);

  // See DynamicLibrary. A copy that is loaded already is torch's: two would not know of each
  // other's work on the device.
  NcclLibrary(const std::vector<std::string>& paths, bool use_loaded);

  int version() const { return version_; }
  // Of the file that is open.
  const std::string& path() const { return path_; }

  // What all ranks of a new communicator need to find each other.
  NcclUniqueId unique_id() const;

  NcclResult (*get_version)(int*);
  NcclResult (*get_unique_id)(NcclUniqueId*);
  const char* (*get_error_string)(NcclResult);
  const char* (*get_last_error)(NcclComm*);
  NcclResult (*comm_init_rank_config)(NcclComm**, int, NcclUniqueId, int, NcclConfig*);
  NcclResult (*comm_get_async_error)(NcclComm*, NcclResult*);
  NcclResult (*comm_finalize)(NcclComm*);
  NcclResult (*comm_destroy)(NcclComm*);
  NcclResult (*comm_abort)(NcclComm*);
  NcclResult (*group_start)();
  NcclResult (*group_end)();
  NcclResult (*send)(const void*, std::size_t, NcclType, int, NcclComm*, void*);
  NcclResult (*recv)(void*, std::size_t, NcclType, int, NcclComm*, void*);
  NcclResult (*broadcast)(const void*, void*, std::size_t, NcclType, int, NcclComm*, void*);
  NcclResult (*reduce)(const void*, void*, std::size_t, NcclType, NcclOp, int, NcclComm*, void*);
  NcclResult (*all_reduce)(const void*, void*, std::size_t, NcclType, NcclOp, NcclComm*, void*);
  NcclResult (*all_gather)(const void*, void*, std::size_t, NcclType, NcclComm*, void*);
  NcclResult (*reduce_scatter)(const void*, void*, std::size_t, NcclType, NcclOp, NcclComm*, void*);

 private:
  DynamicLibrary library_;
  std::string path_;
  int version_ = 0;
};

// "2.27.5" of 22705.
std::string version_text(int version);

}  // namespace pydist::comm
