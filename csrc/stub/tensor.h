// The fields of `gpubridge.pb_utils.Tensor` as a C type.
#pragma once

#include "ipc/records.h"
#include "python_object.h"

namespace gpubridge::stub {

enum TensorField : std::size_t { kName, kDatatype, kShape, kSource, kArray, kLent, kTensorFields };

// `kLent` exports the bytes of a tensor that arrived; `kSource` is a memoryview of them, made on
// demand, or of other bytes that are to be sent.
struct Tensor {
  PyObject_HEAD  // NOLINT
      std::array<PyObject*, kTensorFields>
          fields;
  TensorRef place;  // where its bytes are in memory that can be handed on
  bool placed;
};

// Makes the type, and remembers the Python class that does what it leaves to others.
PyTypeObject* tensor_type();
void use_tensor_reference(nb::handle reference);
// Says which class derived from the type adds no attributes. The collector need not know its
// instances that consist of an array or of bytes that arrived: they are part of no cycle that it
// could find.
void use_tensor_class(nb::handle kind);

// False for one that was made without __init__.
inline bool is_initialized(const Tensor* tensor) {
  return tensor->fields[kName] != nullptr && tensor->fields[kDatatype] != nullptr &&
         tensor->fields[kShape] != nullptr;
}

// The exporter of the bytes that are sent of a tensor; null where Python has to make them.
inline PyObject* exporter(const Tensor* tensor) {
  for (const TensorField field : {kSource, kLent, kArray}) {
    if (tensor->fields[field] != nullptr) return tensor->fields[field];
  }
  return nullptr;
}

inline bool is_tensor(PyObject* object) { return PyObject_TypeCheck(object, tensor_type()) != 0; }

// A tensor that arrived, of a class derived from the type; its bytes are what `lent` exports.
nb::object received_tensor(PyTypeObject* kind, nb::handle name, nb::handle datatype,
                           nb::handle shape, nb::object lent, const TensorRef* place);

// The key of a signature before it is encoded: names, datatypes and ranks of tensors, and their
// dims as a record has them.
struct SignatureKey {
  std::string kinds;
  std::string dims;

  // Adds a tensor; returns how many elements it has.
  std::uint64_t add(nb::handle name, nb::handle datatype, nb::handle shape) {
    const Py_ssize_t rank = PyTuple_Size(shape.ptr());
    add_text(name.ptr());
    add_text(datatype.ptr());
    append_number(kinds, static_cast<std::uint32_t>(rank));
    std::uint64_t elements = 1;
    for (Py_ssize_t axis = 0; axis < rank; ++axis) {
      const long long dim = PyLong_AsLongLong(PyTuple_GetItem(shape.ptr(), axis));
      if (dim == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
      append_number(dims, static_cast<std::int64_t>(dim));
      elements *= static_cast<std::uint64_t>(dim);
    }
    return elements;
  }

  // Throws a Python error for what is no str, or has lone surrogates.
  void add_text(PyObject* text) {
    const std::string_view utf8 = view_of_text(text);
    append_number(kinds, static_cast<std::uint32_t>(utf8.size()));
    kinds.append(utf8);
  }
};

}  // namespace gpubridge::stub
