// Hooks: functions that the dynamic linker finds before those of the C library, and calls of the
// functions that they replace.
//
// This library is preloaded (LD_PRELOAD), so each symbol that it exports wins over the same symbol
// of the C library, in all of the program's libraries. A hook does its part for packed files, and
// calls real_NAME for everything else. Hooks run in any thread, before main and in the child of a
// fork, so this file has no lock, and no constructor that must have run.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <type_traits>

namespace pydist::preload {

// The function of a name that the next library has: the C library, or one that is preloaded, too.
// `Function` is its type, such as int(const char*, int, ...), from which a call takes and converts
// its arguments. constinit: hooks are called before constructors of this library have run.
template <class Function>
class Real;

// The part that does not depend on the parameters.
template <class Result>
class RealBase {
 public:
  constexpr explicit RealBase(const char* name) : name_(name) {}

 protected:
  // The address, looked up with the first call; nullptr if no library has it. Several threads may
  // look it up at once, and find the same.
  void* find() {
    void* found = found_.load(std::memory_order_acquire);
    if (found == nullptr) {
      found = dlsym(RTLD_NEXT, name_);
      found_.store(found, std::memory_order_release);
    }
    return found;
  }

  // The result of a function that this C library does not have: nullptr or -1, with errno ENOSYS.
  static Result unknown() {
    errno = ENOSYS;
    if constexpr (std::is_pointer_v<Result>) {
      return nullptr;
    } else if constexpr (!std::is_void_v<Result>) {
      return static_cast<Result>(-1);
    }
  }

 private:
  const char* name_;
  std::atomic<void*> found_{nullptr};
};

// Functions with fixed parameters.
template <class Result, class... Parameters>
class Real<Result(Parameters...)> : RealBase<Result> {
 public:
  using RealBase<Result>::RealBase;
  Result operator()(Parameters... arguments) {
    void* found = this->find();
    if (found == nullptr) return this->unknown();
    return reinterpret_cast<Result (*)(Parameters...)>(found)(arguments...);
  }
};

// Functions with further arguments after the parameters, as open. The call must be one of a type
// with an ellipsis: a system may pass such arguments differently.
template <class Result, class... Parameters>
class Real<Result(Parameters..., ...)> : RealBase<Result> {
 public:
  using RealBase<Result>::RealBase;
  template <class... Further>
  Result operator()(Parameters... arguments, Further... further) {
    void* found = this->find();
    if (found == nullptr) return this->unknown();
    return reinterpret_cast<Result (*)(Parameters..., ...)>(found)(arguments..., further...);
  }
};

// Sets errno to an error, and returns the -1 of a call that fails with it.
inline int fail(int error) {
  errno = error;
  return -1;
}

}  // namespace pydist::preload

#define PYDIST_EXPORT __attribute__((visibility("default")))

// Defines the function `hook_NAME`, whose symbol is NAME, and `real_NAME`, which calls the function
// of the next library. The body follows, as after a function's head. The name hook_NAME keeps the
// headers' declarations of NAME (their attributes, macros and inline bodies) from applying to it.
// Within this library, ::NAME is the hook, too.
#define PYDIST_HOOK(result, name, ...)                                                      \
  extern "C" PYDIST_EXPORT result hook_##name(__VA_ARGS__) __asm__(#name);                  \
  namespace {                                                                               \
  [[maybe_unused]] constinit pydist::preload::Real<result(__VA_ARGS__)> real_##name{#name}; \
  }                                                                                         \
  result hook_##name(__VA_ARGS__)

// A second symbol of a hook of the same file, as of `open64`, which is `open` on 64-bit systems.
#define PYDIST_ALIAS(second, name)                                              \
  extern "C" PYDIST_EXPORT decltype(hook_##name) hook_##second __asm__(#second) \
      __attribute__((alias(#name)))
