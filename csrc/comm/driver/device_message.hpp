// Bytes in device memory that are sent to a rank, or received from one.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pydist::comm {

struct DeviceMessage {
  int peer;
  std::byte* address;
  std::size_t bytes;
};

// "exchange (to rank 1 24 bytes; from rank 1 24 bytes)": how errors name an exchange.
std::string describe_exchange(const std::vector<DeviceMessage>& sends,
                              const std::vector<DeviceMessage>& receives);

// Refuses peers outside a group of `size` ranks; `what` names what connects it.
void require_peers(const std::vector<DeviceMessage>& messages, int size, const char* what);

}  // namespace pydist::comm
