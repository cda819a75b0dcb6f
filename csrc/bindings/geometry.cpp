// Boxes, partitions, footprints and exchange plans for Python.
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "core/box.hpp"
#include "core/footprint.hpp"
#include "core/partition.hpp"
#include "core/plan.hpp"

namespace pydist::bindings {
namespace {

using namespace py::literals;

// Immutable on the Python side, too: a list would suggest that it may be changed.
py::tuple to_tuple(const std::vector<index_t>& values) {
  py::tuple tuple(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) tuple[i] = py::int_(values[i]);
  return tuple;
}

py::tuple slices_of(const Box& box) {
  py::tuple slices(box.ndim());
  for (int dim = 0; dim < box.ndim(); ++dim) {
    const std::optional<py::ssize_t> lo = box.lo()[dim], hi = box.hi()[dim];
    slices[static_cast<std::size_t>(dim)] = py::slice(lo, hi, std::nullopt);
  }
  return slices;
}

// Compared with anything else, Python's default answers: unequal.
template <class T, class... Options>
void bind_equality(py::class_<T, Options...>& type) {
  type.def("__eq__", [](const T& a, const T& b) { return a == b; }, py::is_operator(), "other"_a);
}

void bind_box(py::module_& module) {
  py::class_<Box> type(module, "Box", py::is_final(),
                       "Half-open box lo[d] <= i[d] < hi[d] in global indices, 1 to 8 dims.");
  type.def(py::init<const Coords&, const Coords&>(), "lo"_a, "hi"_a)
      .def_property_readonly("lo", &Box::lo)
      .def_property_readonly("hi", &Box::hi)
      .def_property_readonly("shape", &Box::shape)
      .def_property_readonly("volume", &Box::volume, "Number of elements.")
      .def_property_readonly("empty", &Box::empty)
      .def_property_readonly("slices", &slices_of, "The box as an index of an array.")
      .def("intersect", &Box::intersect, "other"_a, "The common indices; empty if disjoint.")
      .def("shift", &Box::shift, "offset"_a, "This box moved by `offset`.")
      .def("contains", &Box::contains, "other"_a,
           "Whether all of `other` is in this box; an empty one always does.")
      .def("__hash__", [](const Box& box) { return hash_of(box); })
      .def("__repr__", [](const Box& box) { return to_string(box); })
      .def(py::pickle([](const Box& box) { return py::make_tuple(box.lo(), box.hi()); },
                      [](const py::tuple& state) {
                        return Box(state[0].cast<Coords>(), state[1].cast<Coords>());
                      }));
  bind_equality(type);
  module.def("subtract", &subtract, "outer"_a, "inner"_a,
             "`outer` without `inner`, as at most 2 * ndim disjoint boxes.");
}

void bind_partition(py::module_& module) {
  py::class_<Partition> type(module, "Partition", py::is_final(),
                             "Split points of one dim: part i is [points[i], points[i + 1]).");
  type.def(py::init<std::vector<index_t>>(), "points"_a)
      .def_static("even", &Partition::even, "extent"_a, "parts"_a,
                  "Sizes differ by at most one; the first parts are the larger ones.")
      .def_property_readonly("points", [](const Partition& p) { return to_tuple(p.points()); })
      .def_property_readonly("parts", &Partition::parts)
      .def_property_readonly("extent", &Partition::extent)
      .def_property_readonly("sizes",
                             [](const Partition& partition) {
                               std::vector<index_t> sizes;
                               for (index_t part = 0; part < partition.parts(); ++part) {
                                 const auto [lo, hi] = partition.interval(part);
                                 sizes.push_back(hi - lo);
                               }
                               return to_tuple(sizes);
                             })
      .def("interval", &Partition::interval, "part"_a, "(lo, hi) of a part.")
      .def("owner", &Partition::owner, "index"_a, "The part that holds an index.")
      .def("__hash__", [](const Partition& p) { return py::hash(to_tuple(p.points())); })
      .def("__repr__", [](const Partition& p) { return "Partition(" + p.describe() + ")"; })
      .def(py::pickle(
          [](const Partition& p) { return py::make_tuple(p.points()); },
          [](const py::tuple& state) { return Partition(state[0].cast<std::vector<index_t>>()); }));
  bind_equality(type);
}

py::tuple footprint_state(const Footprint& footprint) {
  if (footprint.is_adaptive()) return py::make_tuple(footprint.inputs(), footprint.outputs());
  return py::make_tuple(footprint.kernel(), footprint.stride(), footprint.dilation(),
                        footprint.padding_lo(), footprint.padding_hi());
}

Footprint footprint_of(const py::tuple& state) {
  const auto value = [&](std::size_t i) { return state[i].cast<index_t>(); };
  if (state.size() == 2) return Footprint::adaptive(value(0), value(1));
  return Footprint(value(0), value(1), value(2), value(3), value(4));
}

void bind_footprint(py::module_& module) {
  py::class_<Footprint> type(
      module, "Footprint", py::is_final(),
      "Along one dim, output o reads o * stride - padding_lo + k * dilation, 0 <= k < kernel.");
  type.def(py::init<index_t, index_t, index_t, index_t, index_t>(), "kernel"_a, "stride"_a = 1,
           "dilation"_a = 1, "padding_lo"_a = 0, "padding_hi"_a = 0)
      .def_static("adaptive", &Footprint::adaptive, "inputs"_a, "outputs"_a,
                  "Windows that cut a dim into `outputs` almost equal pieces: output o reads\n"
                  "[floor(o * inputs / outputs), ceil((o + 1) * inputs / outputs)).")
      .def_property_readonly("kernel", &Footprint::kernel)
      .def_property_readonly("stride", &Footprint::stride)
      .def_property_readonly("dilation", &Footprint::dilation)
      .def_property_readonly("padding_lo", &Footprint::padding_lo)
      .def_property_readonly("padding_hi", &Footprint::padding_hi)
      .def_property_readonly("outputs", &Footprint::outputs, "Of adaptive windows, else 0.")
      .def("output_extent", &Footprint::output_extent, "extent"_a)
      .def("needs", &Footprint::needs, "lo"_a, "hi"_a,
           "Input interval that the outputs [lo, hi) read; not clipped to the domain.")
      .def("feeds", &Footprint::feeds, "lo"_a, "hi"_a,
           "Output interval whose needs meet the inputs [lo, hi); not clipped.")
      .def("output_partition", &Footprint::output_partition, "input"_a,
           "Each output goes to the part that holds the input at its kernel's center.")
      .def("__hash__", [](const Footprint& f) { return py::hash(footprint_state(f)); })
      .def("__repr__",
           [](const Footprint& f) {
             return (f.is_adaptive() ? "Footprint.adaptive" : "Footprint") +
                    py::str(footprint_state(f)).cast<std::string>();
           })
      .def(py::pickle(&footprint_state, &footprint_of));
  bind_equality(type);
}

void bind_plan_types(py::module_& module) {
  py::class_<Transfer> transfer(module, "Transfer", py::is_final(), "One box on its way.");
  transfer.def_readonly("box", &Transfer::box)
      .def_readonly("slot", &Transfer::slot, "Which of the receiver's needed boxes it fills.")
      .def("__repr__", [](const Transfer& t) {
        return "Transfer(" + to_string(t.box) + ", slot=" + std::to_string(t.slot) + ")";
      });
  bind_equality(transfer);

  py::class_<Message> message(module, "Message", py::is_final(),
                              "All that travels between two ranks in one direction.");
  message.def_readonly("peer", &Message::peer)
      .def_readonly("transfers", &Message::transfers,
                    "In the order of the message; equal for sender and receiver.")
      .def_property_readonly("elements", &Message::elements)
      .def("__repr__", [](const Message& m) {
        return "Message(peer=" + std::to_string(m.peer) + ", " +
               std::to_string(m.transfers.size()) + " transfers, " + std::to_string(m.elements()) +
               " elements)";
      });
  bind_equality(message);

  py::class_<Plan>(module, "Plan", py::is_final(), "The messages of one exchange, for one rank.")
      .def_readonly("rank", &Plan::rank)
      .def_readonly("copies", &Plan::copies, "What this rank gives itself.")
      .def_readonly("sends", &Plan::sends, "Sorted by peer.")
      .def_readonly("recvs", &Plan::recvs, "Sorted by peer.")
      .def("__repr__", [](const Plan& plan) {
        return "Plan(rank=" + std::to_string(plan.rank) + ", " +
               std::to_string(plan.copies.size()) + " copies, " +
               std::to_string(plan.sends.size()) + " sends, " + std::to_string(plan.recvs.size()) +
               " recvs)";
      });
}

constexpr const char* kPlanExchangeDoc =
    R"doc(Plans the exchange that brings to each rank the boxes it needs.

Args:
    owned: what each rank holds. Equal boxes are replicas, others must be disjoint; empty ones are
        allowed. Among replicas a receiver takes its own, else the one of rank
        ``holders[receiver % len(holders)]``.
    needed: the boxes (slots) that each rank wants, by rank. Parts that no rank owns are padding.
    rank: whose plan to make.

Returns:
    The plan of `rank`: copied and received boxes cover, disjointly, what it needs and some rank
    owns.

Raises:
    ValueError: boxes overlap or differ in their number of dims.
)doc";

}  // namespace

void bind_core(py::module_& module) {
  bind_box(module);
  bind_partition(module);
  bind_footprint(module);
  bind_plan_types(module);
  module.def(
      "plan_exchange",
      [](std::vector<Box> owned, std::vector<std::vector<Box>> needed, int rank) {
        const ExchangeSpec spec{std::move(owned), std::move(needed)};
        const py::gil_scoped_release release;
        return plan_exchange(spec, rank);
      },
      "owned"_a, "needed"_a, "rank"_a, kPlanExchangeDoc);
}

}  // namespace pydist::bindings
