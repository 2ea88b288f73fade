// Python types whose instances are C structs. All objects that an instance refers to are in its
// array `fields`, so that one set of functions serves the collector for every type; or it is one
// C++ object, which the collector need not know.
//
// Only functions of the limited API of CPython 3.12 are used. Slot functions let no C++ exception
// out: they are called by the interpreter.
#pragma once

#include <exception>
#include <initializer_list>

#include "python_object.h"

#if PY_VERSION_HEX < 0x030C0000
// The names that 3.12 brought into Python.h.
#include <structmember.h>
#define _Py_T_OBJECT T_OBJECT       // NOLINT
#define Py_T_OBJECT_EX T_OBJECT_EX  // NOLINT
#define Py_T_LONGLONG T_LONGLONG    // NOLINT
#define Py_T_PYSSIZET T_PYSSIZET    // NOLINT
#define Py_READONLY READONLY        // NOLINT
#endif

namespace gpubridge {

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
inline void give(PyObject*& field, nb::object value) {
  PyObject* old = field;
  field = value.release().ptr();
  Py_XDECREF(old);
}

// Runs what may throw, and returns `failed` with a Python error set where it did.
template <typename Result, typename Function>
Result guarded(Result failed, Function&& function) noexcept {
  try {
    return std::forward<Function>(function)();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return failed;
}

// Calls the __init__ of the Python class that does what a type does, for an instance of the type.
inline int initialize_in_python(PyObject* init, PyObject* self, PyObject* args,
                                PyObject* keywords) {
  const nb::object own = nb::make_tuple(nb::handle(self));
  const nb::object all = checked(PySequence_Concat(own.ptr(), args));
  checked(PyObject_Call(init, all.ptr(), keywords));
  return 0;
}

// An attribute that is kept as long as the process lives.
inline PyObject* kept_attribute(nb::handle object, const char* name) {
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

// The object in a field (borrowed); null with an AttributeError set if there is none.
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
  // Held: another thread may put something else into the field meanwhile.
  const nb::object all = nb::borrow(field<Object>(self, Index));
  return all.is_valid() ? PySequence_List(all.ptr()) : nullptr;
}

// Members that are the first fields, by their names in order; null for a field that is no member.
// Those that are `empty` read as None, else there is an AttributeError.
template <typename Object>
PyMemberDef* field_members(std::initializer_list<const char*> names, bool empty = false,
                           std::initializer_list<PyMemberDef> others = {}) {
  static std::vector<PyMemberDef> members;
  std::size_t offset = offsetof(Object, fields);
  for (const char* name : names) {
    const auto at = static_cast<Py_ssize_t>(std::exchange(offset, offset + sizeof(PyObject*)));
    if (name != nullptr) {
      members.push_back({name, empty ? _Py_T_OBJECT : Py_T_OBJECT_EX, at, 0, nullptr});
    }
  }
  members.insert(members.end(), others);
  members.push_back({nullptr, 0, 0, 0, nullptr});
  return members.data();
}

inline PyTypeObject* make_type(const char* name, std::size_t size, unsigned long flags,
                               std::vector<PyType_Slot>& slots) {
  slots.push_back({0, nullptr});
  PyType_Spec spec = {name, static_cast<int>(size), 0,
                      static_cast<unsigned>(Py_TPFLAGS_DEFAULT | flags), slots.data()};
  return reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&spec)).release().ptr());
}

// A type of what has `fields`, with slots of its own beside those for the collector.
template <typename Object, void (*Deallocate)(PyObject*) = deallocate<Object>>
PyTypeObject* fields_type(const char* name, std::vector<PyType_Slot> slots,
                          unsigned long flags = Py_TPFLAGS_BASETYPE) {
  slots.push_back({Py_tp_dealloc, slot(Deallocate)});
  slots.push_back({Py_tp_traverse, slot(traverse<Object>)});
  slots.push_back({Py_tp_clear, slot(clear<Object>)});
  return make_type(name, sizeof(Object), flags | Py_TPFLAGS_HAVE_GC, slots);
}

// An instance of a type or of a class derived from it, its fields empty.
template <typename Object>
nb::object allocate(PyTypeObject* type) {
  return checked(reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0));
}

// An instance of a type that is a C++ object.
template <typename Value>
struct Boxed {
  PyObject_HEAD  // NOLINT
      Value value;
};

template <typename Value>
Value& unboxed(PyObject* self) {
  return as<Boxed<Value>>(self)->value;
}

template <typename Value>
void deallocate_boxed(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  std::destroy_at(&unboxed<Value>(self));
  PyObject_Free(self);
  Py_DECREF(type);
}

template <typename Value>
PyTypeObject* boxed_type(const char* name, std::vector<PyType_Slot> slots = {}) {
  slots.push_back({Py_tp_dealloc, slot(deallocate_boxed<Value>)});
  return make_type(name, sizeof(Boxed<Value>), Py_TPFLAGS_DISALLOW_INSTANTIATION, slots);
}

template <typename Value>
nb::object box(PyTypeObject* type, Value value) {
  auto* made = PyObject_New(Boxed<Value>, type);
  if (made == nullptr) throw nb::python_error();
  new (&made->value) Value(std::move(value));
  return nb::steal(reinterpret_cast<PyObject*>(made));
}

// Shows objects to the collector; each must be held by nothing else.
inline int visit_all(std::initializer_list<const nb::object*> held, visitproc visit, void* arg) {
  for (const nb::object* object : held) Py_VISIT(object->ptr());
  return 0;
}

// Drops objects; what that calls meets none of them.
inline void drop_all(std::initializer_list<nb::object*> held) {
  std::vector<nb::object> dropped;
  for (nb::object* object : held) dropped.push_back(std::exchange(*object, nb::none()));
}

// The slots by which the collector asks an object that nanobind made; the object has `traverse` and
// `clear`.
template <typename Held>
int traverse_held(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Held>(self)->traverse(visit, arg) : 0;
}

template <typename Held>
int clear_held(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Held>(self)->clear();
  return 0;
}

template <typename Held>
PyType_Slot* collected() {
  static PyType_Slot slots[] = {// NOLINT: the C API's own form
                                {Py_tp_traverse, slot(traverse_held<Held>)},
                                {Py_tp_clear, slot(clear_held<Held>)},
                                {0, nullptr}};
  return slots;
}

// The slots of what is called with an outcome, which is given to its `answer`.
template <typename Held>
PyObject* call_held(PyObject* self, PyObject* arguments, PyObject* /*keywords*/) {
  PyObject* const outcome = PyTuple_GetItem(arguments, 0);
  if (outcome == nullptr) return nullptr;
  return guarded<PyObject*>(nullptr, [&] {
    nb::inst_ptr<Held>(self)->answer(outcome);
    return Py_NewRef(Py_None);
  });
}

template <typename Held>
PyType_Slot* called() {
  static PyType_Slot slots[] = {// NOLINT: the C API's own form
                                {Py_tp_call, slot(call_held<Held>)},
                                {Py_tp_traverse, slot(traverse_held<Held>)},
                                {Py_tp_clear, slot(clear_held<Held>)},
                                {0, nullptr}};
  return slots;
}

// True if all characters of a str are ASCII.
inline bool is_ascii(PyObject* text) {
  Py_ssize_t size = 0;
  if (PyUnicode_AsUTF8AndSize(text, &size) == nullptr) {
    PyErr_Clear();
    return false;
  }
  return size == PyUnicode_GetLength(text);
}

}  // namespace gpubridge
