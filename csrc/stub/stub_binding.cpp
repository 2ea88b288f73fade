// The stub's runtime for Python: the base classes of what models see, and finding tensors by name.

#include "heap_type.h"
#include "list_items.h"
#include "std.h"
#include "stub/request.h"
#include "stub/response.h"
#include "stub/tensor.h"

namespace gpubridge {
namespace {

// The compiled base class that does what a Python class does; what it does not take, that does.
nb::object compiled_base(nb::handle reference) {
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

// Of more tensors an index is made when one of them is looked up.
constexpr Py_ssize_t kFew = 8;

nb::object name_of(nb::handle tensor) {
  if (!stub::is_tensor(tensor.ptr())) return nb::object(tensor.attr("_name"));
  PyObject* name = field<stub::Tensor>(tensor.ptr(), stub::kName);
  if (name == nullptr) throw nb::python_error();
  return nb::borrow(name);
}

nb::object searched(nb::handle tensors, nb::handle name) {
  for (nb::handle tensor : tensors) {
    if (name_of(tensor).equal(name)) return nb::borrow(tensor);
  }
  return nb::none();
}

// Finds a tensor of a list by its name. `index` keeps the list, and a dict of its tensors by name,
// once that was made; of two of one name the first is found.
nb::object by_name(nb::handle tensors, nb::handle name, PyObject*& index) {
  if (PyList_CheckExact(tensors.ptr()) == 0 || PyList_Size(tensors.ptr()) <= kFew ||
      PyUnicode_CheckExact(name.ptr()) == 0) {
    return searched(tensors, name);
  }
  nb::object kept = nb::borrow(index);
  if (!kept.is_valid() || PyTuple_GetItem(kept.ptr(), 0) != tensors.ptr()) {
    nb::dict made;
    const std::vector<nb::object> now = items_of(tensors);
    for (auto tensor = now.rbegin(); tensor != now.rend(); ++tensor) {
      made[name_of(*tensor)] = *tensor;
    }
    kept = nb::make_tuple(tensors, made);
    assign(index, kept.ptr());
  }
  PyObject* found = PyDict_GetItemWithError(PyTuple_GetItem(kept.ptr(), 1), name.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  return found == nullptr ? nb::none() : nb::borrow(found);
}

// Finds a tensor of what has a list of them in a field, by its name; of an object of a Python class
// the list is an attribute.
template <typename Owner>
nb::object tensor_of(nb::handle owner, PyTypeObject* type, std::size_t list, std::size_t index,
                     const char* attribute, nb::handle name) {
  if (PyObject_TypeCheck(owner.ptr(), type) == 0) return searched(owner.attr(attribute), name);
  const nb::object tensors = nb::borrow(field<Owner>(owner.ptr(), list));
  if (!tensors.is_valid()) throw nb::python_error();
  return by_name(tensors, name, as<Owner>(owner.ptr())->fields[index]);
}

nb::object input_by_name(nb::handle request, nb::handle name) {
  return tensor_of<stub::Request>(request, stub::request_type(), stub::kInputs, stub::kInputIndex,
                                  "_inputs", name);
}

nb::object output_by_name(nb::handle response, nb::handle name) {
  return tensor_of<stub::Response>(response, stub::response_type(), stub::kTensors,
                                   stub::kTensorIndex, "_tensors", name);
}

}  // namespace

void bind_stub(nb::module_& module) {
  module.def("fields_type", &compiled_base);
  module.def("input_by_name", &input_by_name, nb::arg("inference_request"), nb::arg("name").none());
  module.def("output_by_name", &output_by_name, nb::arg("inference_response"),
             nb::arg("name").none());
}

}  // namespace gpubridge
