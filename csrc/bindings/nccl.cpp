// NCCL for Python. Buffers come as (address, bytes): pydist/comm/transports/nccl has checked
// device, contiguity and dtype, and keeps the tensors.
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/device_buffers.hpp"
#include "comm/nccl/communicator.hpp"
#include "core/errors.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;
using comm::CudaDriver;
using comm::GroupError;
using comm::NcclCommunicator;
using comm::NcclLibrary;

// Of exchanges that are collectives: no channel has it.
constexpr int kNoTag = -1;

struct Element {
  comm::NcclType type;
  std::size_t bytes;
};

// The dtypes that NCCL adds as torch does; other dtypes are widened before.
Element element_from_name(const std::string& name) {
  using comm::NcclType;
  if (name == "uint8") return {NcclType::kUint8, 1};
  if (name == "int32") return {NcclType::kInt32, 4};
  if (name == "int64") return {NcclType::kInt64, 8};
  if (name == "float32") return {NcclType::kFloat32, 4};
  if (name == "float64") return {NcclType::kFloat64, 8};
  throw UsageError("NCCL does not reduce elements of dtype '" + name + "'");
}

comm::NcclOp op_from_name(const std::string& name) {
  if (name == "sum") return comm::NcclOp::kSum;
  if (name == "max") return comm::NcclOp::kMax;
  if (name == "min") return comm::NcclOp::kMin;
  throw UsageError("reduction '" + name + "' is none of sum, max, min");
}

comm::NcclUniqueId id_from(const std::string& bytes) {
  comm::NcclUniqueId id;
  PYDIST_EXPECT(bytes.size() == sizeof id, "a unique id has " + std::to_string(sizeof id) +
                                               " bytes; got " + std::to_string(bytes.size()));
  std::memcpy(&id, bytes.data(), sizeof id);
  return id;
}

// An operation that was started, and the event after it.
class Ticket {
 public:
  explicit Ticket(std::shared_ptr<NcclCommunicator> group)
      : group_(std::move(group)), done_(std::make_shared<comm::Event>(group_->context())) {}

  const NcclCommunicator::Done& done() const { return done_; }
  void wait(Address caller) { group_->wait(done_, stream(caller)); }
  bool reached() { return group_->reached(done_); }

 private:
  std::shared_ptr<NcclCommunicator> group_;
  NcclCommunicator::Done done_;
};

// An exchange that is repeated, in the same buffers.
class Channel {
 public:
  Channel(std::shared_ptr<NcclCommunicator> group, const Messages& sends, const Messages& receives,
          int tag)
      : group_(group),
        ticket_(std::move(group)),
        sends_(messages(sends)),
        receives_(messages(receives)),
        tag_(tag) {}

  void start(Address caller) {
    group_->exchange(sends_, receives_, tag_, stream(caller), ticket_.done());
  }
  void wait(Address caller) { ticket_.wait(caller); }

 private:
  std::shared_ptr<NcclCommunicator> group_;
  Ticket ticket_;
  std::vector<comm::DeviceMessage> sends_, receives_;
  int tag_;
};

template <class Call>
std::unique_ptr<Ticket> started(const std::shared_ptr<NcclCommunicator>& group, Call call) {
  auto ticket = std::make_unique<Ticket>(group);
  call(ticket->done());
  return ticket;
}

// The classes of pydist/errors.py.
void translate(std::exception_ptr error) {
  const auto raise = [](const char* type, const char* message) {
    py::set_error(error_type(type), message);
  };
  try {
    std::rethrow_exception(std::move(error));
  } catch (const comm::LibraryMissing& fault) {
    raise("NotSupported", fault.what());
  } catch (const comm::DriverError& fault) {
    raise("PydistError", fault.what());
  } catch (const GroupError& fault) {
    switch (fault.fault()) {
      case GroupError::Fault::kUsage:
        return raise("UsageError", fault.what());
      case GroupError::Fault::kOtherRank:
        return raise("RankFailed", fault.what());
      case GroupError::Fault::kTimeout:
        return raise("RankLost", fault.what());
      case GroupError::Fault::kLibrary:
        return raise("PydistError", fault.what());
    }
  }
}

void bind_communicator(py::module_& module) {
  using Group = std::shared_ptr<NcclCommunicator>;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  // Registered in pybind11 before a function has it as an argument.
  py::class_<NcclCommunicator, Group> communicator(
      module, "NcclCommunicator", "Ranks that NCCL connects, and the stream they use.");

  py::class_<Ticket>(module, "NcclTicket", "An operation under way.")
      .def("wait", &Ticket::wait, "caller"_a, NoGil(), "Makes the stream `caller` wait for it.")
      .def("reached", &Ticket::reached, NoGil(), "Whether it is complete on the device.");

  py::class_<Channel>(module, "NcclChannel", "An exchange that is repeated, in the same buffers.")
      .def(py::init<Group, const Messages&, const Messages&, int>(), "group"_a, "sends"_a,
           "receives"_a, "tag"_a)
      .def("start", &Channel::start, "caller"_a, NoGil())
      .def("wait", &Channel::wait, "caller"_a, NoGil());

  communicator
      .def(py::init([](std::shared_ptr<NcclLibrary> library, std::shared_ptr<CudaDriver> driver,
                       const py::bytes& id, int rank, int size, int device, double connect_seconds,
                       double issue_seconds) {
             const comm::NcclUniqueId unique = id_from(id);
             const py::gil_scoped_release unlocked;
             return std::make_shared<NcclCommunicator>(
                 std::move(library), std::move(driver), unique, rank, size, device,
                 comm::NcclLimits{connect_seconds, issue_seconds});
           }),
           "library"_a, "driver"_a, "unique_id"_a, "rank"_a, "size"_a, "device"_a,
           "connect_seconds"_a, "issue_seconds"_a)
      .def_property_readonly(
          "stream",
          [](const NcclCommunicator& group) { return reinterpret_cast<Address>(group.stream()); })
      .def(
          "exchange",
          [](const Group& group, const Messages& sends, const Messages& receives, Address caller) {
            return started(group, [&](const NcclCommunicator::Done& done) {
              group->exchange(messages(sends), messages(receives), kNoTag, stream(caller), done);
            });
          },
          "sends"_a, "receives"_a, "caller"_a, NoGil())
      .def(
          "broadcast",
          [](const Group& group, Address address, std::size_t bytes, int root, Address caller) {
            return started(group, [&](const NcclCommunicator::Done& done) {
              group->broadcast(pointer(address), bytes, root, stream(caller), done);
            });
          },
          "address"_a, "bytes"_a, "root"_a, "caller"_a, NoGil())
      .def(
          "all_reduce",
          [](const Group& group, Address address, std::size_t count, const std::string& dtype,
             const std::string& op, Address caller) {
            return started(group, [&](const NcclCommunicator::Done& done) {
              group->all_reduce(pointer(address), count, element_from_name(dtype).type,
                                op_from_name(op), stream(caller), done);
            });
          },
          "address"_a, "count"_a, "dtype"_a, "op"_a, "caller"_a, NoGil())
      .def(
          "all_gather",
          [](const Group& group, Address row, const std::vector<std::size_t>& bytes,
             Address caller) {
            return started(group, [&](const NcclCommunicator::Done& done) {
              group->all_gather(pointer(row), bytes, stream(caller), done);
            });
          },
          "row"_a, "bytes"_a, "caller"_a, NoGil())
      .def(
          "reduce_scatter",
          [](const Group& group, Address row, const std::vector<std::size_t>& counts,
             const std::string& dtype, Address out, Address caller) {
            const Element element = element_from_name(dtype);
            return started(group, [&](const NcclCommunicator::Done& done) {
              group->reduce_scatter(pointer(row), counts, element.bytes, element.type, pointer(out),
                                    stream(caller), done);
            });
          },
          "row"_a, "counts"_a, "dtype"_a, "out"_a, "caller"_a, NoGil())
      .def_property_readonly("sent", &NcclCommunicator::sent, "Fingerprints, one a rank.")
      .def_property_readonly("received", &NcclCommunicator::received)
      .def("abort", &NcclCommunicator::abort, NoGil())
      .def("close", &NcclCommunicator::close, NoGil());
}

}  // namespace

void bind_nccl(py::module_& module) {
  py::register_local_exception_translator(translate);
  py::class_<NcclLibrary, std::shared_ptr<NcclLibrary>>(module, "NcclLibrary",
                                                        "NCCL, opened at run time.")
      .def(py::init<const std::vector<std::string>&, bool>(), "paths"_a, "use_loaded"_a = true,
           "Opens the copy that the process has already (torch's), or the first path that opens.")
      .def_property_readonly("version", &NcclLibrary::version, "Such as 22705 of 2.27.5.")
      .def_property_readonly("path", &NcclLibrary::path)
      .def("unique_id", [](const NcclLibrary& library) {
        const comm::NcclUniqueId id = library.unique_id();
        return py::bytes(id.internal, sizeof id);
      });
  py::class_<CudaDriver, std::shared_ptr<CudaDriver>>(module, "CudaDriver",
                                                      "libcuda, opened at run time.")
      .def(py::init<const std::string&>(), "path"_a = "libcuda.so.1");
  bind_communicator(module);
}

}  // namespace pydist::bindings
