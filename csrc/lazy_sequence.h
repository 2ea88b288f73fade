// A sequence for Python whose items are made when they are asked for: most never are.
#pragma once

#include "heap_type.h"
#include "python_object.h"

namespace gpubridge {

// `Item` has `object()`, which makes the Python object of an item. The items refer to no Python
// object that could refer to them, so that the collector need not know the sequence.
template <typename Item>
class LazySequence {
 public:
  static nb::object make(std::vector<Item> items) { return box(type(), std::move(items)); }

  // The items of such a sequence; null for another object.
  static const std::vector<Item>* of(nb::handle object) {
    return Py_TYPE(object.ptr()) == type() ? &items_of(object.ptr()) : nullptr;
  }

 private:
  static std::vector<Item>& items_of(PyObject* self) { return unboxed<std::vector<Item>>(self); }

  static Py_ssize_t length(PyObject* self) {
    return static_cast<Py_ssize_t>(items_of(self).size());
  }

  static PyObject* item(PyObject* self, Py_ssize_t index) {
    if (index < 0 || index >= length(self)) {
      PyErr_SetString(PyExc_IndexError, "no such item");
      return nullptr;
    }
    return guarded(static_cast<PyObject*>(nullptr), [&] {
      return items_of(self)[static_cast<std::size_t>(index)].object().release().ptr();
    });
  }

  static PyTypeObject* type() {
    static PyTypeObject* const made = boxed_type<std::vector<Item>>(
        Item::kTypeName, {{Py_sq_length, slot(length)}, {Py_sq_item, slot(item)}});
    return made;
  }
};

}  // namespace gpubridge
