// The functions by which each binding file adds to the module. module.cpp calls them once, when the
// module is imported, and then bind_<family> of each folder in csrc/ops.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/coords_caster.hpp"  // in all files: else Coords would be an unknown class

namespace pydist::bindings {

namespace py = pybind11;

// The class pydist.errors.<name>: that file lists all errors. For the translators of C++
// exceptions. Call with the GIL held.
inline py::object error_type(const char* name) {
  return py::module_::import("pydist.errors").attr(name);
}

void bind_core(py::module_& module);        // geometry.cpp: boxes, partitions, footprints, plans
void bind_io(py::module_& module);          // io.cpp
void bind_hardware(py::module_& module);    // hardware.cpp: devices, threads, instruction set
void bind_call_board(py::module_& module);  // call_board.cpp: the calls that a rank has started
void bind_calls(py::module_& module);       // calls.cpp: modules and numbers of a program's calls
void bind_comm(py::module_& module);        // comm.cpp: the hub of the local transport
void bind_nccl(py::module_& module);        // nccl.cpp: NCCL, opened at run time
void bind_ipc(py::module_& module);         // ipc.cpp: memory that processes share on devices
void bind_packs(py::module_& module);       // packs.cpp: many small files in a few large ones
void bind_watchdog(py::module_& module);    // watchdog.cpp: ends a hanging job

}  // namespace pydist::bindings
