// The stub's runtime for Python: the base classes of what models see, and finding tensors by name.

#include <nanobind/stl/string.h>

#include <string>

#include "dataplane.h"
#include "stub/heap_type.h"
#include "stub/request.h"
#include "stub/response.h"
#include "stub/tensor.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

using stub::as;

// The compiled base class that does what a Python class does; what it does not take, that does.
nb::object fields_type(nb::handle reference) {
  const auto name = nb::cast<std::string>(reference.attr("__name__"));
  PyTypeObject* type = nullptr;
  if (name == "TensorFields") {
    type = stub::tensor_type();
    stub::use_tensor_reference(reference);
  } else if (name == "RequestFields") {
    type = stub::request_type();
    stub::use_request_reference(reference);
  } else if (name == "ResponseFields") {
    type = stub::response_type();
    stub::use_response_reference(reference);
  } else {
    throw nb::value_error(("no compiled type does what " + name + " does").c_str());
  }
  return nb::borrow(reinterpret_cast<PyObject*>(type));
}

nb::object named(nb::handle tensors, nb::handle name) {
  for (nb::handle tensor : tensors) {
    const nb::object own =
        stub::is_tensor(tensor.ptr())
            ? nb::object(
                  nb::steal(Py_XNewRef(stub::field<stub::Tensor>(tensor.ptr(), stub::kName))))
            : nb::object(tensor.attr("_name"));
    if (!own.is_valid()) throw nb::python_error();
    const int same = PyObject_RichCompareBool(own.ptr(), name.ptr(), Py_EQ);
    if (same < 0) throw nb::python_error();
    if (same != 0) return nb::borrow(tensor);
  }
  return nb::none();
}

nb::object input_by_name(nb::handle request, nb::handle name) {
  if (PyObject_TypeCheck(request.ptr(), stub::request_type()) == 0) {
    return named(request.attr("_inputs"), name);
  }
  PyObject* inputs = stub::field<stub::Request>(request.ptr(), stub::kInputs);
  if (inputs == nullptr) throw nb::python_error();
  return named(inputs, name);
}

nb::object output_by_name(nb::handle response, nb::handle name) {
  if (PyObject_TypeCheck(response.ptr(), stub::response_type()) == 0) {
    return named(response.attr("_tensors"), name);
  }
  PyObject* tensors = stub::field<stub::Response>(response.ptr(), stub::kTensors);
  if (tensors == nullptr) throw nb::python_error();
  return named(tensors, name);
}

}  // namespace

void bind_stub(nb::module_& module) {
  module.def("fields_type", &fields_type);
  module.def("input_by_name", &input_by_name, nb::arg("inference_request"), nb::arg("name"));
  module.def("output_by_name", &output_by_name, nb::arg("inference_response"), nb::arg("name"));
}

}  // namespace gpubridge
