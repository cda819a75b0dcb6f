// Errors of the native core, of the caller and of pydist itself, and the checks that raise them.
#pragma once

#include <stdexcept>
#include <string>

namespace pydist {

// The caller passed something impossible. Python sees pydist.errors.UsageError.
class UsageError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// pydist itself is wrong: the message asks the user to report it. Python sees a RuntimeError.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

}  // namespace pydist

// Refuses a call. `message` is an expression of type std::string that names the given and the
// possible values; it is evaluated only on failure.
#define PYDIST_EXPECT(condition, message)               \
  do {                                                  \
    if (!(condition)) [[unlikely]]                      \
      throw ::pydist::UsageError(std::string(message)); \
  } while (false)

// Guards an invariant of the code itself.
#define PYDIST_INVARIANT(condition)                                                                \
  do {                                                                                             \
    if (!(condition)) [[unlikely]]                                                                 \
      throw ::pydist::InternalError(                                                               \
          std::string("broken invariant, please report this: " #condition " (") + __FILE__ + ":" + \
          std::to_string(__LINE__) + ")");                                                         \
  } while (false)
