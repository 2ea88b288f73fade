// Python types whose instances are C structs. All objects that an instance refers to are in its
// array `fields`, so that one set of functions serves the collector for every type.
//
// Only functions of the limited API of CPython 3.12 are used. Slot functions let no C++ exception
// out: they are called by the interpreter.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <exception>
#include <utility>

#if PY_VERSION_HEX < 0x030C0000
// The names that 3.12 brought into Python.h.
#include <structmember.h>
#define _Py_T_OBJECT T_OBJECT       // NOLINT
#define Py_T_OBJECT_EX T_OBJECT_EX  // NOLINT
#define Py_T_LONGLONG T_LONGLONG    // NOLINT
#define Py_T_PYSSIZET T_PYSSIZET    // NOLINT
#define Py_READONLY READONLY        // NOLINT
#endif

namespace gpubridge::stub {

template <typename Object>
Object* as(PyObject* self) {
  return reinterpret_cast<Object*>(self);
}

template <typename Function>
void* slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

// Puts an object (borrowed) into a field.
inline void assign(PyObject*& field, PyObject* value) {
  PyObject* old = field;
  field = Py_XNewRef(value);
  Py_XDECREF(old);
}

// Puts an object that the caller owns into a field.
inline void give(PyObject*& field, nanobind::object value) {
  PyObject* old = field;
  field = value.release().ptr();
  Py_XDECREF(old);
}

inline nanobind::object checked(PyObject* made) {
  if (made == nullptr) throw nanobind::python_error();
  return nanobind::steal(made);
}

// Runs what may throw, and returns `failed` with a Python error set where it did.
template <typename Result, typename Function>
Result guarded(Result failed, Function&& function) noexcept {
  try {
    return std::forward<Function>(function)();
  } catch (nanobind::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return failed;
}

// Calls the __init__ of the Python class that does what a type does, for an instance of the type.
inline int initialize_in_python(PyObject* init, PyObject* self, PyObject* args,
                                PyObject* keywords) {
  const nanobind::object own = nanobind::make_tuple(nanobind::handle(self));
  const nanobind::object all = checked(PySequence_Concat(own.ptr(), args));
  checked(PyObject_Call(init, all.ptr(), keywords));
  return 0;
}

// An attribute that is kept as long as the process lives.
inline PyObject* kept_attribute(nanobind::handle object, const char* name) {
  return checked(PyObject_GetAttrString(object.ptr(), name)).release().ptr();
}

template <typename Object>
int traverse(PyObject* self, visitproc visit, void* arg) {
  for (PyObject* field : as<Object>(self)->fields) Py_VISIT(field);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

template <typename Object>
int clear(PyObject* self) {
  for (PyObject*& field : as<Object>(self)->fields) Py_CLEAR(field);
  return 0;
}

template <typename Object>
void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear<Object>(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// What is in a field (borrowed); null with an AttributeError set where nothing was put there.
template <typename Object>
PyObject* field(PyObject* self, std::size_t index) {
  PyObject* field = as<Object>(self)->fields[index];
  if (field == nullptr) PyErr_SetString(PyExc_AttributeError, "the object was not initialized");
  return field;
}

// A method without arguments that gives a field.
template <typename Object, std::size_t Index>
PyObject* give_field(PyObject* self, PyObject* /*unused*/) {
  return Py_XNewRef(field<Object>(self, Index));
}

// A method without arguments that gives a new list of what is in a field.
template <typename Object, std::size_t Index>
PyObject* give_list(PyObject* self, PyObject* /*unused*/) {
  PyObject* all = field<Object>(self, Index);
  return all == nullptr ? nullptr : PySequence_List(all);
}

template <typename Object>
PyMemberDef member(const char* name, std::size_t index) {
  const std::size_t offset = offsetof(Object, fields) + index * sizeof(PyObject*);
  return {name, Py_T_OBJECT_EX, static_cast<Py_ssize_t>(offset), 0, nullptr};
}

// An instance of a type or of a class derived from it, its fields empty.
template <typename Object>
nanobind::object allocate(PyTypeObject* type) {
  return checked(reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0));
}

// Says whether all characters of a str are ASCII.
inline bool is_ascii(PyObject* text) {
  Py_ssize_t size = 0;
  if (PyUnicode_AsUTF8AndSize(text, &size) == nullptr) {
    PyErr_Clear();
    return false;
  }
  return size == PyUnicode_GetLength(text);
}

}  // namespace gpubridge::stub
