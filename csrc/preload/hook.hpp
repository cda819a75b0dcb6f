// Hooks: functions that stand before those of the C library, and the functions behind them.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <type_traits>

namespace pydist::preload {

// The function of a name that the next library has: the C library, or one that is preloaded, too.
template <class Function>
class Real;

template <class Result>
class RealBase {
 public:
  constexpr explicit RealBase(const char* name) : name_(name) {}

 protected:
  void* find() {
    void* found = found_.load(std::memory_order_acquire);
    if (found == nullptr) {
      found = dlsym(RTLD_NEXT, name_);
      found_.store(found, std::memory_order_release);
    }
    return found;
  }

  // What a call fails with that this C library does not have.
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

// What a call returns that fails with an error.
inline int fail(int error) {
  errno = error;
  return -1;
}

}  // namespace pydist::preload

#define PYDIST_EXPORT __attribute__((visibility("default")))

// Defines the function `hook_NAME`, whose symbol is NAME, and `real_NAME`, the function behind it.
// The headers' declarations of NAME (their attributes, macros and inline bodies) do not apply to
// it.
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
