// A sequence for Python whose items are made when they are asked for: most never are.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "stub/heap_type.h"

namespace gpubridge {

// `Item` has `object()`, which makes the Python object of an item. The items refer to no Python
// object that could refer to them, so that the collector need not know the sequence.
template <typename Item>
class LazySequence {
 public:
  static nanobind::object make(std::vector<Item> items) {
    auto* sequence = PyObject_New(Sequence, type());
    if (sequence == nullptr) throw nanobind::python_error();
    new (&sequence->items) std::vector<Item>(std::move(items));
    return nanobind::steal(reinterpret_cast<PyObject*>(sequence));
  }

  // The items of such a sequence; null for another object.
  static const std::vector<Item>* of(nanobind::handle object) {
    return Py_TYPE(object.ptr()) == type() ? &stub::as<Sequence>(object.ptr())->items : nullptr;
  }

 private:
  struct Sequence {
    PyObject_HEAD  // NOLINT
        std::vector<Item>
            items;
  };

  static void deallocate(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    stub::as<Sequence>(self)->items.~vector();
    PyObject_Free(self);
    Py_DECREF(type);
  }

  static Py_ssize_t length(PyObject* self) {
    return static_cast<Py_ssize_t>(stub::as<Sequence>(self)->items.size());
  }

  static PyObject* item(PyObject* self, Py_ssize_t index) {
    const std::vector<Item>& items = stub::as<Sequence>(self)->items;
    if (index < 0 || index >= length(self)) {
      PyErr_SetString(PyExc_IndexError, "no such item");
      return nullptr;
    }
    return stub::guarded(static_cast<PyObject*>(nullptr), [&] {
      return items[static_cast<std::size_t>(index)].object().release().ptr();
    });
  }

  static PyTypeObject* type() {
    static PyType_Slot slots[] = {// NOLINT: the C API's own form
                                  {Py_tp_dealloc, stub::slot(deallocate)},
                                  {Py_sq_length, stub::slot(length)},
                                  {Py_sq_item, stub::slot(item)},
                                  {0, nullptr}};
    static PyType_Spec spec = {Item::kTypeName, sizeof(Sequence), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    static auto* const made =
        reinterpret_cast<PyTypeObject*>(stub::checked(PyType_FromSpec(&spec)).release().ptr());
    return made;
  }
};

}  // namespace gpubridge
