// Key of a signature before it is encoded: names, datatypes and ranks of tensors.
#pragma once

#include "little_endian.h"
#include "python_object.h"
#include "stub/tensor.h"

namespace gpubridge::stub {

// Gathers the kinds of tensors, and their dims as a record has them.
struct SignatureKey {
  std::string kinds;
  std::string dims;

  void add(const Tensor* tensor) {
    PyObject* shape = tensor->fields[kShape];
    const Py_ssize_t rank = PyTuple_Size(shape);
    add_text(tensor->fields[kName]);
    add_text(tensor->fields[kDatatype]);
    append_number(kinds, static_cast<std::uint32_t>(rank));
    for (Py_ssize_t axis = 0; axis < rank; ++axis) {
      const long long dim = PyLong_AsLongLong(PyTuple_GetItem(shape, axis));
      if (dim == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
      append_number(dims, static_cast<std::int64_t>(dim));
    }
  }

  // Throws a Python error for what is no str, or has lone surrogates.
  void add_text(PyObject* text) {
    const std::string_view utf8 = view_of_text(text);
    append_number(kinds, static_cast<std::uint32_t>(utf8.size()));
    kinds.append(utf8);
  }
};

}  // namespace gpubridge::stub
