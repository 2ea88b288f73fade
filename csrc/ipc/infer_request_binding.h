// Requests and responses inside the server as C types; gpubridge/_native.pyi says what they are.
// Other bindings read and make them without looking attributes up.
#pragma once

#include "ipc/response_window.h"
#include "python_object.h"

namespace gpubridge {

// Base of types whose objects are in their array `fields`, in which null is None.
template <typename Object>
struct FieldAccess {
  [[nodiscard]] nb::handle object() {
    return reinterpret_cast<PyObject*>(static_cast<Object*>(this));
  }
  [[nodiscard]] bool has(std::size_t field) const {
    return in(field) != nullptr && in(field) != Py_None;
  }
  // Borrowed.
  [[nodiscard]] nb::handle get(std::size_t field) const { return has(field) ? in(field) : Py_None; }
  void set(std::size_t field, nb::handle value) {
    PyObject* old = in(field);
    static_cast<Object*>(this)->fields[field] = value.inc_ref().ptr();
    Py_XDECREF(old);
  }
  // Empties a field; returns what was there.
  nb::object take(std::size_t field) {
    PyObject* old = in(field);
    static_cast<Object*>(this)->fields[field] = nullptr;
    return old == nullptr ? nb::none() : nb::steal(old);
  }

 private:
  [[nodiscard]] PyObject* in(std::size_t field) const {
    return static_cast<const Object*>(this)->fields[field];
  }
};

struct InferRequest : FieldAccess<InferRequest> {
  enum Field : std::size_t {
    kSignature,
    kSlot,
    kPlaces,
    kOnDone,
    kIdentifier,
    kContext,
    kOptions,
    kDims,
    kOnPartial,
    kFirst,
    kItem,
    kPattern,
    kClient,
    kRanges,
    kCancelled,
    kTrace,
    kInstance,
    kAccount,
    kStored,
    kFields
  };

  PyObject_HEAD  // NOLINT
      std::array<PyObject*, kFields>
          fields;
  PyObject* weak_references;
  long long start;
  long long copied;
  long long batch_size;
  long long arrived;
  long long ticket;
  long long unsent;
  // Made with the first response that is not the last.
  ResponseWindow* window;

  // Each calls Python, and throws what that raises; the caller holds the request meanwhile.
  // Stores the response instead while its window is not open: `store` makes what stores those of a
  // request; None for a reader that takes all.
  void respond(nb::handle outcome, nb::handle store);
  void passed_on(long long responses);
  void finish(nb::object outcome);
  void cancel();
  // At most 128 characters of the identifier.
  [[nodiscard]] std::string shown_identifier() const;

 private:
  void hand_out(nb::handle outcome, nb::handle store);
  void hand_out_stored();
};

struct InferResponse : FieldAccess<InferResponse> {
  enum Field : std::size_t {
    kSignature,
    kShapes,
    kBuffers,
    kParameters,
    kMemory,
    kRefs,
    kEvent,
    kFields
  };

  PyObject_HEAD  // NOLINT
      std::array<PyObject*, kFields>
          fields;
};

// Field values of a new request; null for a default.
struct RequestParts {
  PyObject* signature = nullptr;
  PyObject* slot = nullptr;
  PyObject* places = nullptr;
  PyObject* on_done = nullptr;
  PyObject* identifier = nullptr;
  PyObject* context = nullptr;
  PyObject* options = nullptr;
  PyObject* dims = nullptr;
  long long start = 0;
  long long copied = 0;
  long long batch_size = 1;
};

nb::object make_infer_request(const RequestParts& parts);
// A response of a class derived from the type, without fields of its own; the others are empty.
nb::object make_infer_response(nb::handle kind, nb::handle signature, nb::handle shapes,
                               nb::handle buffers);

// Returns the object as this type; throws TypeError for another.
InferRequest& infer_request(nb::handle object);
InferResponse& infer_response(nb::handle object);
[[nodiscard]] bool is_infer_response(nb::handle object);

}  // namespace gpubridge
