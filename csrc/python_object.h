// Short forms of what bindings do with Python objects.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "std.h"

namespace gpubridge {

namespace nb = nanobind;

// A new reference, or the error that is set instead.
inline nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

inline nb::object text_object(std::string_view text) {
  return checked(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
}

inline nb::bytes bytes_object(std::string_view bytes) {
  return nb::steal<nb::bytes>(
      checked(PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())))
          .release());
}

// Runs what may throw, and has `failed` called with the Python error: also where memory is short,
// which is an error of what was run and of nothing else.
template <typename Call, typename Failed>
void attempt(Call&& call, Failed&& failed) {
  try {
    call();
  } catch (nb::python_error& error) {
    failed(nb::borrow(error.value()));
  } catch (const std::bad_alloc&) {
    failed(nb::object(nb::handle(PyExc_MemoryError)()));
  }
}

// The same for many bytes, which are copied without the interpreter's lock.
inline nb::object long_bytes_object(std::string_view bytes) {
  nb::object made =
      checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes.size())));
  char* data = PyBytes_AsString(made.ptr());
  const nb::gil_scoped_release unlocked;
  std::memcpy(data, bytes.data(), bytes.size());
  return made;
}

// A tuple of what `make` returns for each index.
template <typename Make>
nb::object tuple_of(std::size_t count, Make&& make) {
  nb::object made = checked(PyTuple_New(static_cast<Py_ssize_t>(count)));
  for (std::size_t index = 0; index < count; ++index) {
    nb::object item = make(index);
    // Takes the reference over, even when it fails.
    if (PyTuple_SetItem(made.ptr(), static_cast<Py_ssize_t>(index), item.release().ptr()) != 0) {
      throw nb::python_error();
    }
  }
  return made;
}

inline std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// The bytes of a bytes object, for as long as that lives.
inline std::string_view view_of_bytes(nb::handle bytes) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) throw nb::python_error();
  return {data, static_cast<std::size_t>(size)};
}

// The text of a str, for as long as that lives.
inline std::string_view view_of_text(nb::handle text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (data == nullptr) throw nb::python_error();
  return {data, static_cast<std::size_t>(size)};
}

// Part of what can be sliced, as a memoryview.
inline nb::object slice_of(const nb::object& whole, std::uint64_t begin, std::uint64_t end) {
  return whole[nb::slice(nb::int_(begin), nb::int_(end), nb::none())];
}

// The class of errors that are sent to clients.
inline nb::handle bridge_error() {
  static const nb::handle type =
      nb::module_::import_("gpubridge.errors").attr("BridgeError").inc_ref();
  return type;
}

// Borrowed; there must be such an item.
inline nb::handle tuple_item(nb::handle tuple, Py_ssize_t index) {
  return PyTuple_GetItem(tuple.ptr(), index);
}

// A NamedTuple of fields.
template <typename... Fields>
nb::object named_tuple(nb::handle type, Fields&&... fields) {
  nb::object made = checked(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type.ptr()),
                                                static_cast<Py_ssize_t>(sizeof...(fields))));
  Py_ssize_t index = 0;
  const auto add = [&](nb::object field) {
    // Takes the reference over, even when it fails.
    if (PyTuple_SetItem(made.ptr(), index++, field.release().ptr()) != 0) throw nb::python_error();
  };
  (add(nb::cast(std::forward<Fields>(fields))), ...);
  return made;
}

// An int that is not negative.
inline std::uint64_t number_of(nb::handle number) {
  const std::uint64_t value = PyLong_AsUnsignedLongLong(number.ptr());
  if (value == static_cast<std::uint64_t>(-1) && PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
  return value;
}

// The text of an attribute's name, as an argument of templates.
template <std::size_t Size>
struct AttributeName {
  consteval AttributeName(const char (&given)[Size]) { std::copy_n(given, Size, text); }  // NOLINT
  char text[Size];
};

// The name as an object, which is made once.
template <AttributeName Name>
PyObject* name_object() {
  static PyObject* const made = PyUnicode_InternFromString(Name.text);
  return made;
}

template <AttributeName Name>
nb::object attribute(nb::handle object) {
  return checked(PyObject_GetAttr(object.ptr(), name_object<Name>()));
}

template <AttributeName Name>
void set_attribute(nb::handle object, nb::handle value) {
  if (PyObject_SetAttr(object.ptr(), name_object<Name>(), value.ptr()) != 0) {
    throw nb::python_error();
  }
}

}  // namespace gpubridge
