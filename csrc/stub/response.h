// The fields of `gpubridge.pb_utils.InferenceResponse` as a C type.
#pragma once

#include "python_object.h"

namespace gpubridge::stub {

enum ResponseField : std::size_t {
  kTensors,
  kError,
  kResponseParameters,
  kTensorIndex,  // see by_name
  kResponseFields
};

struct Response {
  PyObject_HEAD  // NOLINT
      std::array<PyObject*, kResponseFields>
          fields;
};

// A response of tensors (a list, which becomes its own), of a class derived from the type.
nb::object received_response(PyTypeObject* kind, nb::object tensors);

// Makes the type, and remembers the Python class that does what it leaves to others.
PyTypeObject* response_type();
void use_response_reference(nb::handle reference);

}  // namespace gpubridge::stub
