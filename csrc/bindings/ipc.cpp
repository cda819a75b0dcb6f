// CUDA IPC for Python. Buffers come as (peer, address, bytes): pydist/comm/transports/ipc has
// checked device and contiguity, and keeps the tensors. Offers are bytes.
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/device_buffers.hpp"
#include "comm/ipc/channel.hpp"
#include "core/errors.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;
using comm::CudaDriver;
using comm::IpcChannel;
using comm::IpcGroup;
using comm::IpcMemory;

// Structs that ranks exchange as bytes of memory.
template <class T>
std::string to_bytes(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

template <class T>
T from_bytes(const std::string& bytes, const char* what) {
  T value;
  PYDIST_EXPECT(bytes.size() == sizeof value, std::string(what) + " has " +
                                                  std::to_string(sizeof value) + " bytes; got " +
                                                  std::to_string(bytes.size()));
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

}  // namespace

// Errors are translated in nccl.cpp, for both.
void bind_ipc(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  using Memory = std::shared_ptr<IpcMemory>;
  using Group = std::shared_ptr<IpcGroup>;

  py::class_<IpcMemory, Memory>(module, "IpcMemory",
                                "Memory of a device that processes share, and map.")
      .def(py::init<std::shared_ptr<CudaDriver>, int, std::size_t>(), "driver"_a, "device"_a,
           "block_bytes"_a)
      .def(
          "sample",
          [](const Memory& memory) {
            std::string bytes;
            {
              const py::gil_scoped_release unlocked;
              const comm::Stream any(memory->context());
              const comm::IpcAllocation piece = memory->take_flags(1, any);
              bytes = to_bytes(piece.place);
              memory->recycle(piece, {}, nullptr);
            }
            return py::bytes(bytes);
          },
          "A place of it as others find it.")
      .def(
          "try_map",
          [](const Memory& memory, const std::string& place) {
            memory->mapped(from_bytes<comm::IpcAddress>(place, "a place"));
          },
          "place"_a, NoGil(), "Maps the block that contains a `sample` of another process.")
      .def("unmap", &IpcMemory::unmap, NoGil())
      .def("release", &IpcMemory::release, NoGil());

  py::class_<IpcGroup, Group>(module, "IpcGroup", "Ranks that share memory, and their stream.")
      .def(py::init<Memory, int, int>(), "memory"_a, "rank"_a, "size"_a)
      .def_property_readonly(
          "stream",
          [](const IpcGroup& group) { return reinterpret_cast<Address>(group.stream().handle()); })
      .def("rest", &IpcGroup::rest, "seconds"_a, NoGil());

  py::class_<IpcChannel> channel(module, "IpcChannel", "An exchange that is repeated, by copies.");
  channel.attr("OFFER_BYTES") = sizeof(comm::IpcOffer);
  channel
      .def(py::init([](Group group, const Messages& sends, const Messages& receives) {
             return std::make_unique<IpcChannel>(std::move(group), messages(sends),
                                                 messages(receives));
           }),
           "group"_a, "sends"_a, "receives"_a)
      .def_property_readonly("peers", &IpcChannel::peers, "Ranks that get an offer and give one.")
      .def(
          "offer",
          [](const IpcChannel& channel, int peer) {
            return py::bytes(to_bytes(channel.offer(peer)));
          },
          "peer"_a)
      .def(
          "accept",
          [](IpcChannel& channel, int peer, const std::string& offer) {
            channel.accept(peer, from_bytes<comm::IpcOffer>(offer, "an offer"));
          },
          "peer"_a, "offer"_a, NoGil())
      .def(
          "start", [](IpcChannel& channel, Address caller) { channel.start(stream(caller)); },
          "caller"_a, NoGil())
      .def("issue", &IpcChannel::issue, NoGil())
      .def(
          "wait", [](IpcChannel& channel, Address caller) { channel.wait(stream(caller)); },
          "caller"_a, NoGil());
}

}  // namespace pydist::bindings
