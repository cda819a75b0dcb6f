// Checks of messages that NCCL and CUDA IPC share, and their text for errors.
#include "comm/driver/device_message.hpp"

#include <algorithm>

#include "core/errors.hpp"

namespace pydist::comm {
namespace {

constexpr std::size_t kNamedMessages = 4;

std::string list(const char* direction, const std::vector<DeviceMessage>& messages) {
  std::string text;
  for (std::size_t i = 0; i < std::min(messages.size(), kNamedMessages); ++i) {
    text += std::string(i == 0 ? "" : ", ") + direction + std::to_string(messages[i].peer) + " " +
            std::to_string(messages[i].bytes) + " bytes";
  }
  if (messages.size() > kNamedMessages) {
    text += ", and " + std::to_string(messages.size() - kNamedMessages) + " more";
  }
  return text;
}

}  // namespace

std::string describe_exchange(const std::vector<DeviceMessage>& sends,
                              const std::vector<DeviceMessage>& receives) {
  const char* between = sends.empty() || receives.empty() ? "" : "; ";
  return "exchange (" + list("to rank ", sends) + between + list("from rank ", receives) + ")";
}

void require_peers(const std::vector<DeviceMessage>& messages, int size, const char* what) {
  for (const DeviceMessage& each : messages) {
    PYDIST_EXPECT(each.peer >= 0 && each.peer < size, std::string(what) + ": rank " +
                                                          std::to_string(each.peer) +
                                                          " is none of " + std::to_string(size));
  }
}

}  // namespace pydist::comm
