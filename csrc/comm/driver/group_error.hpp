// Errors between the ranks of a group.
#pragma once

#include <stdexcept>
#include <string>

namespace pydist::comm {

// An operation failed, and no further one of the group can be trusted. Python sees the class of
// pydist/errors.py for the party at fault.
class GroupError : public std::runtime_error {
 public:
  enum class Fault { kUsage, kOtherRank, kTimeout, kLibrary };

  GroupError(Fault fault, const std::string& message)
      : std::runtime_error(message), fault_(fault) {}
  Fault fault() const { return fault_; }

 private:
  Fault fault_;
};

}  // namespace pydist::comm
