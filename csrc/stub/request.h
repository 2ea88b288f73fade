// The fields of `gpubridge.pb_utils.InferenceRequest` as a C type.
#pragma once

#include <nanobind/nanobind.h>

#include <array>

namespace gpubridge::stub {

enum RequestField : std::size_t {
  kInputs,
  kRequestId,
  kCorrelationId,
  kRequested,
  kFlags,
  kTimeout,
  kRequestParameters,
  kModelName,
  kModelVersion,
  kOrigin,
  kTrace,
  kPreferredMemory,
  kReleaseFlags,
  kInputIndex,  // see by_name
  kRequestFields
};

struct Request {
  PyObject_HEAD  // NOLINT
      std::array<PyObject*, kRequestFields>
          fields;
};

// Makes the type, and remembers the Python class that does what it leaves to others.
PyTypeObject* request_type();
void use_request_reference(nanobind::handle reference);

}  // namespace gpubridge::stub
