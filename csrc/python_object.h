// Short forms of what bindings do with Python objects.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace gpubridge {

// A new reference, or the error that is set instead.
inline nanobind::object checked(PyObject* made) {
  if (made == nullptr) throw nanobind::python_error();
  return nanobind::steal(made);
}

inline nanobind::object text_object(std::string_view text) {
  return checked(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
}

inline nanobind::bytes bytes_object(std::string_view bytes) {
  return nanobind::bytes(bytes.data(), bytes.size());
}

// A tuple of what `make` returns for each index.
template <typename Make>
nanobind::object tuple_of(std::size_t count, Make&& make) {
  nanobind::object made = checked(PyTuple_New(static_cast<Py_ssize_t>(count)));
  for (std::size_t index = 0; index < count; ++index) {
    nanobind::object item = make(index);
    // Takes the reference over, even when it fails.
    if (PyTuple_SetItem(made.ptr(), static_cast<Py_ssize_t>(index), item.release().ptr()) != 0) {
      throw nanobind::python_error();
    }
  }
  return made;
}

inline std::string_view view_of(const nanobind::bytes& bytes) {
  return {bytes.c_str(), bytes.size()};
}

// The bytes of a bytes object, for as long as that lives.
inline std::string_view view_of_bytes(nanobind::handle bytes) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) throw nanobind::python_error();
  return {data, static_cast<std::size_t>(size)};
}

// The text of a str, for as long as that lives.
inline std::string_view view_of_text(nanobind::handle text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (data == nullptr) throw nanobind::python_error();
  return {data, static_cast<std::size_t>(size)};
}

// The class of errors that clients are told.
inline nanobind::handle bridge_error() {
  static const nanobind::handle type =
      nanobind::module_::import_("gpubridge.errors").attr("BridgeError").inc_ref();
  return type;
}

// The name of an attribute, made once.
class Attribute {
 public:
  explicit Attribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  [[nodiscard]] nanobind::object of(nanobind::handle object) const {
    return checked(PyObject_GetAttr(object.ptr(), name_));
  }
  void set(nanobind::handle object, nanobind::handle value) const {
    if (PyObject_SetAttr(object.ptr(), name_, value.ptr()) != 0) throw nanobind::python_error();
  }

 private:
  PyObject* name_;
};

}  // namespace gpubridge
