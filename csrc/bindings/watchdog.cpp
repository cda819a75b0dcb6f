// The watchdog for Python. `enter_phase` and `leave_phase` are plain C functions: they are called
// several hundred times per step.
#include <pybind11/stl.h>

#include <string_view>

#include "bindings/bindings.hpp"
#include "watchdog/watcher.hpp"

namespace pydist::bindings {
namespace {

PyObject* enter_phase(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Py_ssize_t length = 0;
  const char* name = count == 2 ? PyUnicode_AsUTF8AndSize(arguments[0], &length) : nullptr;
  const long kind = name != nullptr ? PyLong_AsLong(arguments[1]) : 0;
  if (count != 2 || name == nullptr || (kind == -1 && PyErr_Occurred() != nullptr)) {
    if (PyErr_Occurred() == nullptr) {
      PyErr_SetString(PyExc_TypeError, "enter_phase takes a name and a kind");
    }
    return nullptr;
  }
  watchdog::enter({name, static_cast<std::size_t>(length)}, static_cast<watchdog::PhaseKind>(kind));
  Py_RETURN_NONE;
}

PyObject* leave_phase(PyObject*, PyObject*) {
  watchdog::leave();
  Py_RETURN_NONE;
}

// NOLINTNEXTLINE: CPython keeps pointers to it
PyMethodDef functions[] = {
    {"enter_phase", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(enter_phase)),
     METH_FASTCALL, "enter_phase(name: str, kind: int) -> None\n\nSee pydist.watchdog."},
    {"leave_phase", leave_phase, METH_NOARGS, "leave_phase() -> None\n\nSee pydist.watchdog."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_watchdog(py::module_& module) {
  using namespace py::literals;
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) throw py::error_already_set();
  module.attr("PHASE_SPAN") = static_cast<int>(watchdog::PhaseKind::kSpan);
  module.attr("PHASE_END") = static_cast<int>(watchdog::PhaseKind::kEnd);
  module.attr("PHASE_WAIT") = static_cast<int>(watchdog::PhaseKind::kWait);
  module.attr("PHASE_BLOCKED") = static_cast<int>(watchdog::PhaseKind::kBlocked);
  module.attr("PHASE_WORK") = static_cast<int>(watchdog::PhaseKind::kWork);
  module.def(
      "start_watchdog",
      [](int board, int rank, int size, int here, bool all_here, const std::string& host,
         double limit, int output, bool as_message, int stacks, int signal, int questions,
         int launcher, const std::string& farewell) {
        watchdog::Options options;
        options.rank = rank;
        options.job = {size, all_here, here, host, limit};
        options.output = output;
        options.as_message = as_message;
        options.stacks = stacks;
        options.signal = signal;
        options.questions = questions;
        options.launcher = launcher;
        options.farewell = farewell;
        watchdog::start(options, board);
      },
      "board"_a, "rank"_a, "size"_a, "here"_a, "all_here"_a, "host"_a, "limit"_a, "output"_a,
      "as_message"_a, "stacks"_a, "signal"_a, "questions"_a, "launcher"_a, "farewell"_a,
      "Starts this process's watchdog; see csrc/watchdog/watcher.hpp.");
  module.def("is_watched", &watchdog::is_watched, "Whether this process has a watchdog.");
  module.def("mark_step", &watchdog::mark_step, "step"_a, "Tells the watchdog the training step.");
  module.def("ended_ranks", &watchdog::ended_ranks,
             "The ranks of this machine that have reached the end of their program.");
  module.def(
      "answer_watchdog",
      [](const std::string& layer, const std::string& call) { watchdog::answer(layer, call); },
      "layer"_a, "call"_a, "Tells the watchdog the layer at work, and the call it waits in.");
  module.def(
      "tell_elsewhere", [](const std::string& lines) { watchdog::tell_elsewhere(lines); },
      "lines"_a, "Tells the watchdog what is known of the ranks of other machines.");
}

}  // namespace pydist::bindings
