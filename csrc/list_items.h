// The items of lists that belong to others.
#pragma once

#include "python_object.h"

namespace gpubridge {

// The items of a list as they are now, with a reference to each. Its owner may change the list
// whenever Python code runs, or the interpreter's lock is given up.
inline std::vector<nb::object> items_of(nb::handle list) {
  const Py_ssize_t size = PyList_Size(list.ptr());
  if (size < 0) throw nb::python_error();
  std::vector<nb::object> items;
  items.reserve(static_cast<std::size_t>(size));
  for (Py_ssize_t index = 0; index < size; ++index) {
    items.push_back(nb::borrow(PyList_GetItem(list.ptr(), index)));
  }
  return items;
}

// A list of such items.
inline nb::list list_of(std::span<const nb::object> items) {
  nb::list list;
  for (const nb::object& each : items) list.append(each);
  return list;
}

}  // namespace gpubridge
