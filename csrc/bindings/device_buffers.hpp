// Device buffers and streams as Python gives them: addresses, which its layer has checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "comm/driver/device_message.hpp"

namespace pydist::bindings {

using Address = std::uintptr_t;
using Messages = std::vector<std::tuple<int, Address, std::size_t>>;  // (peer, address, bytes)

inline std::byte* pointer(Address address) { return reinterpret_cast<std::byte*>(address); }

// Streams come as torch's number of them.
inline void* stream(Address number) { return reinterpret_cast<void*>(number); }

inline std::vector<comm::DeviceMessage> messages(const Messages& list) {
  std::vector<comm::DeviceMessage> result;
  for (const auto& [peer, address, bytes] : list) result.push_back({peer, pointer(address), bytes});
  return result;
}

}  // namespace pydist::bindings
