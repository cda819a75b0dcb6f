// The native part of a group's ledger; see pydist/comm/interface/ledger.py. `enter` is a plain C
// function: it is called about a hundred times per step.
#include "comm/board/call_board.hpp"

#include <pybind11/stl.h>

#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "core/errors.hpp"

namespace pydist::bindings {
namespace {

using comm::CallBoard;
using comm::CallPage;
using comm::SeenCall;

// A board, with the object that owns the memory of its pages.
struct HeldBoard : CallBoard {
  std::vector<py::buffer_info> memory;

  void share(const py::buffer& page, const std::vector<std::pair<int, py::buffer>>& neighbors) {
    CallPage& own = at(page, true);
    std::vector<std::pair<int, const CallPage*>> others;
    for (const auto& [rank, buffer] : neighbors) others.emplace_back(rank, &at(buffer, false));
    CallBoard::share(own, std::move(others));
  }

 private:
  CallPage& at(const py::buffer& buffer, bool writable) {
    memory.push_back(buffer.request(writable));
    PYDIST_EXPECT(memory.back().size >= static_cast<py::ssize_t>(sizeof(CallPage)),
                  "a page of calls takes " + std::to_string(sizeof(CallPage)) + " bytes");
    return *static_cast<CallPage*>(memory.back().ptr);
  }
};

py::tuple as_tuple(const SeenCall& call) {
  const auto text = PyUnicode_DecodeUTF8(call.text.data(), std::ssize(call.text), "replace");
  return py::make_tuple(call.number, call.state, call.digest, py::reinterpret_steal<py::str>(text));
}

// enter(digest, text), of the board in a capsule.
PyObject* enter(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  auto* const board = static_cast<CallBoard*>(PyCapsule_GetPointer(capsule, nullptr));
  if (board == nullptr) return nullptr;
  if (count != 2 || !PyLong_Check(arguments[0]) || !PyBytes_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "enter takes a digest and the bytes of a text");
    return nullptr;
  }
  const std::int64_t digest = PyLong_AsLongLong(arguments[0]);
  if (digest == -1 && PyErr_Occurred() != nullptr) return nullptr;
  const std::string_view text(PyBytes_AS_STRING(arguments[1]),
                              static_cast<std::size_t>(PyBytes_GET_SIZE(arguments[1])));
  return PyLong_FromLong(board->enter(digest, text));
}

// NOLINTNEXTLINE: CPython keeps pointers to it
PyMethodDef enter_definition = {
    "enter", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(enter)), METH_FASTCALL,
    "enter(digest: int, text: bytes) -> int\n\n"
    "Enters a call; returns a neighbor that has called something else, or -1."};

// The function `enter` of a board, which keeps the board.
py::object enter_of(const py::object& board) {
  const auto release = [](PyObject* capsule) {
    Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(capsule)));
  };
  const auto capsule = py::reinterpret_steal<py::object>(
      PyCapsule_New(static_cast<CallBoard*>(board.cast<HeldBoard*>()), nullptr, release));
  if (!capsule || PyCapsule_SetContext(capsule.ptr(), board.ptr()) != 0) {
    throw py::error_already_set();
  }
  board.inc_ref();
  return py::reinterpret_steal<py::object>(PyCFunction_New(&enter_definition, capsule.ptr()));
}

}  // namespace

void bind_call_board(py::module_& module) {
  using namespace py::literals;
  py::class_<HeldBoard> board(module, "CallBoard",
                              "What a rank has started in a group, for its neighbors to read.");
  board.attr("PAGE_BYTES") = sizeof(CallPage);
  board.def(py::init<>())
      .def_property_readonly("count", &HeldBoard::count, "Calls so far.")
      .def_property_readonly("state", &HeldBoard::state, "Their running hash.")
      .def_property_readonly("enter", &enter_of,
                             "Enters a call by its digest and text; returns a neighbor that has "
                             "called something else, or -1. Each access makes a new function.")
      .def(
          "stamp",
          [](const HeldBoard& board) {
            const CallBoard::Stamp stamp = board.stamp();
            return py::bytes(reinterpret_cast<const char*>(stamp.data()), sizeof(stamp));
          },
          "Number of the last call, state and digest before it, its digest: 32 bytes.")
      .def("share", &HeldBoard::share, "page"_a, "neighbors"_a,
           "Moves to a page in memory that others read.")
      .def(
          "recent",
          [](const HeldBoard& board) {
            py::list calls;
            for (const SeenCall& call : board.recent()) calls.append(as_tuple(call));
            return calls;
          },
          "Number, state, digest and text of the last calls, the latest at the end.")
      .def(
          "call_of",
          [](const HeldBoard& board, int neighbor, std::int64_t number) -> py::object {
            const auto call = board.call_of(neighbor, number);
            return call ? py::object(as_tuple(*call)) : py::none();
          },
          "neighbor"_a, "number"_a, "The same of a neighbor's call, if its page holds it.");
}

}  // namespace pydist::bindings
