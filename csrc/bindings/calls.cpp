// Inspects a program's call: the module that makes it, and the numbers among its arguments; see
// pydist/comm/interface/ledger.py and pydist/exchange/history.py. Plain C functions: they are
// called about a hundred times per step.
#include <cmath>

#include "bindings/bindings.hpp"

namespace pydist::bindings {
namespace {

constexpr Py_ssize_t kMostShown = 16;

// A new reference from CPython, or null.
template <typename T>
py::object own(T* pointer) {
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(pointer));
}

py::object borrow(PyObject* pointer) { return py::reinterpret_borrow<py::object>(pointer); }

// A new reference from CPython, which has set an error if it is null.
py::object checked(PyObject* pointer) {
  if (pointer == nullptr) throw py::error_already_set();
  return own(pointer);
}

// The innermost frame that runs `code` with a `self` whose dict has `name`: that self, or null.
py::object called_object(PyObject* code, PyObject* name) {
  static PyObject* const self_name = PyUnicode_InternFromString("self");
  py::object frame = borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* const running = reinterpret_cast<PyFrameObject*>(frame.ptr());
    if (own(PyFrame_GetCode(running)).ptr() == code) {
      const py::object locals = checked(PyObject_GetAttrString(frame.ptr(), "f_locals"));
      const py::object self = checked(PyObject_GetItem(locals.ptr(), self_name));
      const py::object dict = checked(PyObject_GenericGetDict(self.ptr(), nullptr));
      if (PyDict_Contains(dict.ptr(), name) == 1) return self;
    }
    frame = own(PyFrame_GetBack(running));
  }
  return {};
}

// The attribute of an object, or null without an error.
py::object attribute(PyObject* object, PyObject* name) {
  PyObject* found = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  const int status = PyObject_GetOptionalAttr(object, name, &found);
#else
  const int status = _PyObject_LookupAttr(object, name, &found);
#endif
  if (status < 0) throw py::error_already_set();
  return own(found);
}

// Python's part of an argument's key, for types that this file does not know.
struct Others {
  PyObject* without;  // a type whose objects are unseen
  PyObject* kinds;    // those with a key
  PyObject* key_of;   // the function that returns it
  PyObject* unseen;   // the key of all others
};

py::object key_of(PyObject* value, const Others& others);

// The keys of a tuple or list, after `first` if there is one.
py::object keys_of(PyObject* first, PyObject* values, const Others& others) {
  const Py_ssize_t offset = first == nullptr ? 0 : 1;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(values);
  py::object keys = checked(PyTuple_New(count + offset));
  if (first != nullptr) PyTuple_SET_ITEM(keys.ptr(), 0, borrow(first).release().ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    py::object key = key_of(PySequence_Fast_GET_ITEM(values, i), others);
    PyTuple_SET_ITEM(keys.ptr(), i + offset, key.release().ptr());
  }
  return keys;
}

py::object key_of(PyObject* value, const Others& others) {
  static PyObject* const history = PyUnicode_InternFromString("_history");
  if (value == Py_None || reinterpret_cast<PyObject*>(Py_TYPE(value)) == others.without) {
    return borrow(others.unseen);
  }
  // -2 has the hash of -1, -0.0 that of 0.0, and NaN another one each time.
  if (PyLong_Check(value)) {
    int overflow = 0;
    if (PyLong_AsLongAndOverflow(value, &overflow) != -2) return borrow(value);
  } else if (PyFloat_CheckExact(value)) {
    const double number = PyFloat_AS_DOUBLE(value);
    const bool is_negative_zero = number == 0 && std::signbit(number);
    if (number != -2 && number == number && !is_negative_zero) return borrow(value);
  } else if ((PyTuple_Check(value) || PyList_Check(value)) &&
             PySequence_Fast_GET_SIZE(value) <= kMostShown) {
    return keys_of(nullptr, value, others);
  } else if (py::object found = attribute(value, history)) {
    return found;
  } else {
    const int known = PyObject_IsInstance(value, others.kinds);
    if (known < 0) throw py::error_already_set();
    if (known == 0 && !PyIndex_Check(value)) return borrow(others.unseen);
  }
  return checked(PyObject_CallOneArg(others.key_of, value));
}

PyObject* call_called_object(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "called_object takes the code of a method and a name");
    return nullptr;
  }
  try {
    py::object found = called_object(arguments[0], arguments[1]);
    return found ? found.release().ptr() : py::none().release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

PyObject* call_key(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 6 || !(PyTuple_Check(arguments[1]) || PyList_Check(arguments[1]))) {
    PyErr_SetString(PyExc_TypeError,
                    "call_key takes a code, the arguments, a type, kinds, a function and a key");
    return nullptr;
  }
  try {
    const Others others{arguments[2], arguments[3], arguments[4], arguments[5]};
    return keys_of(arguments[0], arguments[1], others).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

PyCFunction as_function(PyObject* (*body)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(body));
}

// NOLINTNEXTLINE: CPython keeps pointers to it
PyMethodDef functions[] = {
    {"called_object", as_function(call_called_object), METH_FASTCALL,
     "called_object(code: CodeType, name: str) -> object | None\n\n"
     "The innermost object on the stack whose method `code` runs and whose dict has `name`."},
    {"call_key", as_function(call_key), METH_FASTCALL,
     "call_key(code: int, arguments: Sequence[object], without: type, kinds: tuple[type, ...], "
     "key_of: Callable[[Any], Hashable], unseen: int) -> tuple[Any, ...]\n\n"
     "The code, and of each argument what all ranks must have in common: a number is its own key,\n"
     "a sharded tensor has its history, a short sequence the keys of its elements, the `kinds`\n"
     "and what can be an index have what `key_of` returns; all else, and what is of the type\n"
     "`without`, is `unseen`."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_calls(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) throw py::error_already_set();
}

}  // namespace pydist::bindings
