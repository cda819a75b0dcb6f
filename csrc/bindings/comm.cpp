// The local transport's hub. Buffers come as (address, bytes): pydist/comm/interface has checked
// device, contiguity and dtype, once for all transports, and holds the tensors until the call, or
// `finish`, has returned.
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "comm/local/hub.hpp"
#include "core/errors.hpp"

namespace pydist::bindings {
namespace {

using comm::LocalChannel;
using comm::LocalHub;
using comm::PeerSegment;
using comm::ReduceOp;
using comm::Segment;
using Address = std::uintptr_t;
using Buffer = std::pair<Address, std::size_t>;

std::byte* pointer(Address address) { return reinterpret_cast<std::byte*>(address); }

std::vector<Segment> segments(const std::vector<Buffer>& buffers) {
  std::vector<Segment> result;
  for (const auto& [address, bytes] : buffers) result.push_back({pointer(address), bytes});
  return result;
}

std::vector<PeerSegment> messages(const std::vector<std::tuple<int, Address, std::size_t>>& list) {
  std::vector<PeerSegment> result;
  for (const auto& [peer, address, bytes] : list)
    result.push_back({peer, {pointer(address), bytes}});
  return result;
}

DType dtype_from_name(const std::string& name) {
  for (const DType dtype :
       {DType::kBool, DType::kUInt8, DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64,
        DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    if (name == name_of(dtype)) return dtype;
  }
  throw UsageError("elements of dtype '" + name + "' can't be reduced");
}

ReduceOp op_from_name(const std::string& name) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
    if (name == name_of(op)) return op;
  }
  throw UsageError("reduction '" + name + "' is none of sum, max, min");
}

// The classes of pydist/errors.py, which lists all errors.
void translate(std::exception_ptr error) {
  const auto raise = [](const char* type, const char* message) {
    py::set_error(py::module_::import("pydist.errors").attr(type), message);
  };
  try {
    std::rethrow_exception(std::move(error));
  } catch (const comm::Aborted& failure) {
    raise("RankFailed", failure.what());
  } catch (const comm::Deadlock& failure) {
    raise("RankLost", failure.what());
  }
}

}  // namespace

void bind_comm(py::module_& module) {
  py::register_local_exception_translator(translate);
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<LocalHub, std::shared_ptr<LocalHub>>(
      module, "LocalHub", "Mailboxes and collectives between ranks that are threads.")
      .def(py::init<int>(), py::arg("size"))
      .def_property_readonly("size", &LocalHub::size)
      .def("subgroup", &LocalHub::subgroup, py::arg("parent"), py::arg("sequence"),
           py::arg("members"), NoGil())
      .def(
          "send",
          [](LocalHub& hub, int group, int rank, int dest, int tag, Address address,
             std::size_t bytes) { hub.send(group, rank, dest, tag, {pointer(address), bytes}); },
          py::arg("group"), py::arg("rank"), py::arg("dest"), py::arg("tag"), py::arg("address"),
          py::arg("bytes"), NoGil())
      .def(
          "receive",
          [](LocalHub& hub, int group, int rank, int source, int tag, Address address,
             std::size_t bytes) {
            hub.receive(group, rank, source, tag, {pointer(address), bytes});
          },
          py::arg("group"), py::arg("rank"), py::arg("source"), py::arg("tag"), py::arg("address"),
          py::arg("bytes"), NoGil())
      .def(
          "start_exchange",
          [](LocalHub& hub, int group, int rank, const std::vector<Buffer>& inputs,
             const std::vector<Buffer>& outputs) {
            return hub.start_exchange(group, rank, segments(inputs), segments(outputs));
          },
          py::arg("group"), py::arg("rank"), py::arg("inputs"), py::arg("outputs"), NoGil())
      .def(
          "start_all_reduce",
          [](LocalHub& hub, int group, int rank, Address address, std::size_t count,
             const std::string& dtype, const std::string& op) {
            return hub.start_all_reduce(group, rank, pointer(address), count,
                                        dtype_from_name(dtype), op_from_name(op));
          },
          py::arg("group"), py::arg("rank"), py::arg("address"), py::arg("count"), py::arg("dtype"),
          py::arg("op"), NoGil())
      .def("finish", &LocalHub::finish, py::arg("group"), py::arg("rank"), py::arg("ticket"),
           NoGil())
      .def("abort", &LocalHub::abort, py::arg("reason"), NoGil())
      .def("leave", &LocalHub::leave, py::arg("rank"), NoGil());

  py::class_<LocalChannel>(module, "LocalChannel",
                           "Messages with fixed peers and buffers, sent again and again.")
      .def(
          py::init([](std::shared_ptr<LocalHub> hub, int group, int rank,
                      const std::vector<std::tuple<int, Address, std::size_t>>& sends,
                      const std::vector<std::tuple<int, Address, std::size_t>>& receives, int tag) {
            return std::make_unique<LocalChannel>(std::move(hub), group, rank, messages(sends),
                                                  messages(receives), tag);
          }),
          py::arg("hub"), py::arg("group"), py::arg("rank"), py::arg("sends"), py::arg("receives"),
          py::arg("tag"))
      .def("start", &LocalChannel::start, NoGil())
      .def("wait", &LocalChannel::wait, NoGil());
}

}  // namespace pydist::bindings
