// The fields of `gpubridge.pb_utils.InferenceRequest` as a C type.
#pragma once

#include "python_object.h"

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
  kArrival,
  kRequestFields
};

// `kOrigin` is made of `kArrival` when it is asked for, if the request has one.
struct Request {
  PyObject_HEAD  // NOLINT
      std::array<PyObject*, kRequestFields>
          fields;
};

// A request's connection to the message that it came with. Its origin is made on demand: most
// requests are answered without.
struct Arrival {
  nb::object message;
  std::size_t at;
  nb::object make_origin;  // takes the message and where the record begins in it
  nb::object origin = {};
  std::optional<bool> cancelled = {};  // once the request is answered

  // Gives the origin.
  nb::object ask();
  // Notes that the request is answered.
  void end(bool was_cancelled) {
    cancelled = was_cancelled;
    if (origin.is_valid()) origin.attr("was_cancelled") = was_cancelled;
  }
};

// An Arrival as a Python object, and back.
nb::object arrival_object(Arrival arrival);
Arrival& arrival_of(nb::handle object);

// Parts of a request that arrived; a null object stands for the default.
struct Received {
  nb::object inputs = {};
  nb::object id = {};
  nb::object correlation_id = {};
  nb::object flags = {};
  nb::object timeout = {};
  nb::object parameters = {};
  nb::object trace = {};
  nb::handle requested = {};
  nb::handle model_name = {};
  nb::handle model_version = {};
  nb::object arrival = {};
};

// A request that arrived, of a class derived from the type.
nb::object received_request(PyTypeObject* kind, const Received& received);

// True if a trace is that of requests which belong to none.
bool is_no_trace(PyObject* trace);

// Makes the type, and remembers the Python class that does what it leaves to others.
PyTypeObject* request_type();
void use_request_reference(nb::handle reference);

}  // namespace gpubridge::stub
