#include "stub/response.h"

#include "heap_type.h"
#include "stub/tensor.h"

namespace gpubridge::stub {
namespace {

// Python objects that the type needs; live as long as the process.
struct Known {
  PyObject* init = nullptr;  // the reference's __init__
  PyObject* tensors_name = PyUnicode_InternFromString("output_tensors");
  PyObject* no_parameters = PyUnicode_InternFromString("{}");
};

Known& known() {
  static auto* const instance = new Known();
  return *instance;
}

// The tensors of a response that has only those, by position or by name; null where it may be
// another.
PyObject* only_tensors(PyObject* args, PyObject* keywords) {
  const Py_ssize_t given = PyTuple_Size(args);
  const Py_ssize_t named = keywords == nullptr ? 0 : PyDict_Size(keywords);
  if (given == 1 && named == 0) return PyTuple_GetItem(args, 0);
  if (given != 0 || named != 1) return nullptr;
  return PyDict_GetItemWithError(keywords, known().tensors_name);
}

// Takes the usual: a list of tensors. False where the reference has to look.
bool take_usual(Response* response, PyObject* tensors) {
  if (tensors == nullptr || PyList_CheckExact(tensors) == 0) return false;
  nb::object own = checked(PyList_GetSlice(tensors, 0, PyList_Size(tensors)));
  for (nb::handle tensor : nb::borrow<nb::list>(own)) {
    if (!is_tensor(tensor.ptr())) return false;
  }
  give(response->fields[kTensors], std::move(own));
  assign(response->fields[kError], Py_None);
  assign(response->fields[kResponseParameters], known().no_parameters);
  return true;
}

int initialize(PyObject* self, PyObject* args, PyObject* keywords) {
  return guarded(-1, [&] {
    if (take_usual(as<Response>(self), only_tensors(args, keywords))) return 0;
    if (PyErr_Occurred() != nullptr) return -1;
    return initialize_in_python(known().init, self, args, keywords);
  });
}

PyObject* has_error(PyObject* self, PyObject* /*unused*/) {
  PyObject* error = field<Response>(self, kError);
  return error == nullptr ? nullptr : PyBool_FromLong(error != Py_None);
}

PyMethodDef methods[] = {
    // NOLINT: the C API's own form
    {"output_tensors", give_list<Response, kTensors>, METH_NOARGS,
     "Give the output tensors as a new list."},
    {"has_error", has_error, METH_NOARGS, "Tell whether the response is an error."},
    {"error", give_field<Response, kError>, METH_NOARGS, "Give the error, or None."},
    {"parameters", give_field<Response, kResponseParameters>, METH_NOARGS,
     "Give the parameters as JSON text."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyTypeObject* response_type() {
  static PyTypeObject* const type = fields_type<Response>(
      "gpubridge._native.ResponseFields",
      {{Py_tp_init, slot(initialize)},
       {Py_tp_methods, methods},
       {Py_tp_members, field_members<Response>({"_tensors", "_error", "_parameters"})}});
  return type;
}

nb::object received_response(PyTypeObject* kind, nb::object tensors) {
  nb::object made = allocate<Response>(kind);
  auto& fields = as<Response>(made.ptr())->fields;
  give(fields[kTensors], std::move(tensors));
  assign(fields[kError], Py_None);
  assign(fields[kResponseParameters], known().no_parameters);
  return made;
}

void use_response_reference(nb::handle reference) {
  known().init = kept_attribute(reference, "__init__");
}

}  // namespace gpubridge::stub
