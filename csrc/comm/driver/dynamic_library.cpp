// dlopen and dlsym, with messages that list the attempts.
#include "comm/driver/dynamic_library.hpp"

#include <dlfcn.h>

#include <utility>

namespace pydist::comm {

DynamicLibrary::DynamicLibrary(std::string what, const std::string& loaded,
                               const std::vector<std::string>& paths)
    : what_(std::move(what)) {
  // Never RTLD_GLOBAL: other libraries must not see its symbols.
  if (!loaded.empty()) {
    handle_ = dlopen(loaded.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    path_ = loaded;
  }
  std::string tried;
  for (const std::string& path : paths) {
    if (handle_ != nullptr) break;
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    path_ = path;
    // The linker's message begins with the path.
    if (handle_ == nullptr) tried += (tried.empty() ? "" : "; ") + std::string(dlerror());
  }
  if (handle_ == nullptr) {
    throw LibraryMissing(what_ + " can't be opened: " + (tried.empty() ? "no path given" : tried));
  }
}

void* DynamicLibrary::address(const char* symbol) const {
  void* found = dlsym(handle_, symbol);
  if (found == nullptr) {
    throw LibraryMissing(what_ + " (" + path_ + ") has no function " + symbol);
  }
  return found;
}

}  // namespace pydist::comm
