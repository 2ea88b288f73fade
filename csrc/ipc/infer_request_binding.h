// Requests and responses inside the server as C types; gpubridge/_native.pyi says what they are.
// Other bindings read and make them without looking attributes up.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>

namespace gpubridge {

// What types have in common whose objects are in their array `fields`, in which null is None.
template <typename Object>
struct FieldAccess {
  [[nodiscard]] nanobind::handle object() {
    return reinterpret_cast<PyObject*>(static_cast<Object*>(this));
  }
  [[nodiscard]] bool has(std::size_t field) const {
    return in(field) != nullptr && in(field) != Py_None;
  }
  // Borrowed.
  [[nodiscard]] nanobind::handle get(std::size_t field) const {
    return has(field) ? in(field) : Py_None;
  }
  void set(std::size_t field, nanobind::handle value) {
    PyObject* old = in(field);
    static_cast<Object*>(this)->fields[field] = value.inc_ref().ptr();
    Py_XDECREF(old);
  }
  // Empties a field; returns what was there.
  nanobind::object take(std::size_t field) {
    PyObject* old = in(field);
    static_cast<Object*>(this)->fields[field] = nullptr;
    return old == nullptr ? nanobind::none() : nanobind::steal(old);
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

  // Each calls Python, and throws what that raises; the caller holds the request meanwhile.
  void respond(nanobind::handle outcome);
  void passed_on(long long responses);
  void finish(nanobind::object outcome);
  void cancel();
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

// What a request is made of; null for what is to have its default.
struct RequestParts {
  nanobind::handle signature;
  nanobind::handle slot;
  nanobind::handle places;
  nanobind::handle on_done;
  nanobind::handle identifier;
  nanobind::handle context;
  nanobind::handle options;
  nanobind::handle dims;
  long long start = 0;
  long long copied = 0;
  long long batch_size = 1;
};

nanobind::object make_infer_request(const RequestParts& parts);
// A response of a class derived from the type, without fields of its own; the others are empty.
nanobind::object make_infer_response(nanobind::handle kind, nanobind::handle signature,
                                     nanobind::handle shapes, nanobind::handle buffers);

// What an object is; throws TypeError for another.
InferRequest& infer_request(nanobind::handle object);
InferResponse& infer_response(nanobind::handle object);
[[nodiscard]] bool is_infer_response(nanobind::handle object);

}  // namespace gpubridge
