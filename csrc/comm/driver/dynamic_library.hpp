// Shared libraries found and opened at run time: nothing links to them.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace pydist::comm {

// A library can't be opened, is too old or lacks a symbol. Python sees NotSupported.
class LibraryMissing : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A shared library, open until the process ends: threads that it has started must not be unmapped.
class DynamicLibrary {
 public:
  // Opens the first of `paths` (or plain names) that can be opened.
  // loaded: a name; a copy of it that the process has already loaded is preferred. Empty for none.
  // what: its name in messages.
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

}  // namespace pydist::comm
