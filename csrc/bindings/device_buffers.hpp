// Device buffers and streams as Python gives them: addresses, which its layer has checked.
//
// The exception to tensor_border.hpp: these buffers are in use after the call that got them has
// returned, so Python checks them, keeps them alive, and passes addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "comm/driver/device_message.hpp"

namespace pydist::bindings {

// An address in device memory, a number in Python (data_ptr of a tensor).
using Address = std::uintptr_t;
using Messages = std::vector<std::tuple<int, Address, std::size_t>>;  // (peer, address, bytes)

inline std::byte* pointer(Address address) { return reinterpret_cast<std::byte*>(address); }

// A cudaStream_t from torch's number of it (Stream.cuda_stream); 0 is the default stream.
inline void* stream(Address number) { return reinterpret_cast<void*>(number); }

// The same messages, in the same order.
inline std::vector<comm::DeviceMessage> messages(const Messages& list) {
  std::vector<comm::DeviceMessage> result;
  for (const auto& [peer, address, bytes] : list) result.push_back({peer, pointer(address), bytes});
  return result;
}

}  // namespace pydist::bindings
