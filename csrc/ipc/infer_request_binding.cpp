#include "ipc/infer_request_binding.h"

#include "heap_type.h"
#include "memory/sent_buffers.h"

namespace gpubridge {
namespace {

// Default field values of requests; live as long as the process.
struct Defaults {
  nb::module_ module = nb::module_::import_("gpubridge.request");
  PyObject* context = kept_attribute(module, "NO_CONTEXT");
  PyObject* options = kept_attribute(module, "NO_OPTIONS");
  PyObject* no_response = kept_attribute(module, "NO_RESPONSE");
  PyObject* text = PyUnicode_InternFromString("");
  PyObject* bytes = PyBytes_FromStringAndSize("", 0);
};

const Defaults& defaults() {
  static const auto* const made = new Defaults();
  return *made;
}

void fill(InferRequest& request, const RequestParts& parts) {
  const Defaults& python = defaults();
  const auto put = [&](InferRequest::Field field, PyObject* value, PyObject* other) {
    request.set(field, value != nullptr ? value : other);
  };
  put(InferRequest::kSignature, parts.signature, Py_None);
  put(InferRequest::kSlot, parts.slot, Py_None);
  put(InferRequest::kPlaces, parts.places, Py_None);
  put(InferRequest::kOnDone, parts.on_done, Py_None);
  put(InferRequest::kIdentifier, parts.identifier, python.text);
  put(InferRequest::kContext, parts.context, python.context);
  put(InferRequest::kOptions, parts.options, python.options);
  put(InferRequest::kDims, parts.dims, python.bytes);
  request.start = parts.start;
  request.copied = parts.copied;
  request.batch_size = parts.batch_size;
  request.arrived = request.unsent = 0;
  request.ticket = -1;
}

int initialize_request(PyObject* self, PyObject* args, PyObject* keywords) {
  static constexpr std::array<const char*, 12> kNames{
      "signature", "slot",   "start",      "places",  "on_done", "identifier",
      "context",   "copied", "batch_size", "options", "dims",    nullptr};
  RequestParts parts;
  if (PyArg_ParseTupleAndKeywords(args, keywords, "OOLOO|OOLLOO:InferRequest",
                                  const_cast<char**>(kNames.data()), &parts.signature, &parts.slot,
                                  &parts.start, &parts.places, &parts.on_done, &parts.identifier,
                                  &parts.context, &parts.copied, &parts.batch_size, &parts.options,
                                  &parts.dims) == 0) {
    return -1;
  }
  return guarded(-1, [&] {
    fill(*as<InferRequest>(self), parts);
    return 0;
  });
}

void deallocate_request(PyObject* self) {
  PyObject_GC_UnTrack(self);
  if (as<InferRequest>(self)->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  delete std::exchange(as<InferRequest>(self)->window, nullptr);
  deallocate<InferRequest>(self);
}

// Runs a method without a result.
template <typename Method>
PyObject* run(PyObject* self, Method&& method) {
  return guarded<PyObject*>(nullptr, [&] {
    method(*as<InferRequest>(self));
    return Py_NewRef(Py_None);
  });
}

PyObject* respond(PyObject* self, PyObject* outcome) {
  return run(self, [&](InferRequest& request) { request.respond(outcome, Py_None); });
}

PyObject* passed_on(PyObject* self, PyObject* responses) {
  const long long count = PyLong_AsLongLong(responses);
  if (count == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return run(self, [&](InferRequest& request) { request.passed_on(count); });
}

PyObject* finish(PyObject* self, PyObject* outcome) {
  return run(self, [&](InferRequest& request) { request.finish(nb::borrow(outcome)); });
}

PyObject* cancel(PyObject* self, PyObject* /*unused*/) {
  return run(self, [](InferRequest& request) { request.cancel(); });
}

PyMemberDef number(const char* name, std::size_t offset) {
  return {name, Py_T_LONGLONG, static_cast<Py_ssize_t>(offset), 0, nullptr};
}

PyMethodDef request_methods[] = {
    // NOLINT: the C API's own form
    {"respond", respond, METH_O, "Give a response that is not the last to who waits for it."},
    {"passed_on", passed_on, METH_O, "Say that so many of the responses have left."},
    {"finish", finish, METH_O, "Give the outcome to who waits for it; at most once."},
    {"cancel", cancel, METH_NOARGS, "Cancel the request: its outcome is dropped."},
    {nullptr, nullptr, 0, nullptr}};

int initialize_response(PyObject* self, PyObject* args, PyObject* keywords) {
  static constexpr std::array<const char*, InferResponse::kFields + 1> kNames{
      "signature", "shapes", "buffers", "parameters", "memory", "refs", "event", nullptr};
  std::array<PyObject*, InferResponse::kFields> given{};
  auto& [signature, shapes, buffers, parameters, memory, refs, event] = given;
  if (PyArg_ParseTupleAndKeywords(args, keywords, "OOO|OOOO:InferResponse",
                                  const_cast<char**>(kNames.data()), &signature, &shapes, &buffers,
                                  &parameters, &memory, &refs, &event) == 0) {
    return -1;
  }
  for (std::size_t index = 0; index < given.size(); ++index) {
    if (given[index] != nullptr) as<InferResponse>(self)->set(index, given[index]);
  }
  if (refs == nullptr) as<InferResponse>(self)->set(InferResponse::kRefs, nb::tuple());
  return 0;
}

PyTypeObject* request_type() {
  static PyTypeObject* const type = fields_type<InferRequest, deallocate_request>(
      "gpubridge._native.InferRequest",
      {{Py_tp_init, slot(initialize_request)},
       {Py_tp_methods, request_methods},
       {Py_tp_members, field_members<InferRequest>(
                           {"signature", "slot", "places", "on_done", "identifier", "context",
                            "options", "dims", "on_partial", "first", "item", "pattern", "client",
                            "ranges", "cancelled", "trace", "instance", "account", "stored"},
                           true,
                           {number("start", offsetof(InferRequest, start)),
                            number("copied", offsetof(InferRequest, copied)),
                            number("batch_size", offsetof(InferRequest, batch_size)),
                            number("arrived", offsetof(InferRequest, arrived)),
                            number("ticket", offsetof(InferRequest, ticket)),
                            number("unsent", offsetof(InferRequest, unsent)),
                            {"__weaklistoffset__", Py_T_PYSSIZET,
                             offsetof(InferRequest, weak_references), Py_READONLY, nullptr}})}},
      0);
  return type;
}

PyTypeObject* response_type() {
  static PyTypeObject* const type = fields_type<InferResponse>(
      "gpubridge._native.InferResponseFields",
      {{Py_tp_init, slot(initialize_response)},
       {Py_tp_members,
        field_members<InferResponse>(
            {"signature", "shapes", "buffers", "parameters", "memory", "refs", "event"}, true)}});
  return type;
}

// The bytes of a response's outputs; 0 for an error.
std::uint64_t bytes_of(nb::handle outcome) {
  if (!is_infer_response(outcome)) return 0;
  const nb::handle buffers = infer_response(outcome).get(InferResponse::kBuffers);
  const std::vector<LentSpan>* spans = LentBuffers::of(buffers);
  if (spans == nullptr) return buffers.is_none() ? 0 : SentBuffers(buffers).total();
  std::uint64_t total = 0;
  for (const LentSpan& span : *spans) total += span.size;
  return total;
}

template <typename Object>
Object& checked_as(nb::handle object, PyTypeObject* type, const char* text) {
  if (PyObject_TypeCheck(object.ptr(), type) == 0) throw nb::type_error(text);
  return *as<Object>(object.ptr());
}

}  // namespace

void InferRequest::respond(nb::handle outcome, nb::handle store) {
  unsent += 1;
  if (has(kOnDone) && has(kOnPartial)) {
    hand_out(outcome, store);
    return;
  }
  if (!has(kFirst) && has(kOnDone)) set(kFirst, outcome);
  passed_on(1);
}

void InferRequest::passed_on(long long responses) {
  unsent -= responses;
  if (window != nullptr) window->passed_on(responses);
  if (has(kInstance)) nb::borrow(get(kInstance)).attr("passed_on")(object(), responses);
  hand_out_stored();
}

void InferRequest::hand_out(nb::handle outcome, nb::handle store) {
  if (!store.is_none()) {
    if (window == nullptr) window = new ResponseWindow();
    const std::uint64_t nbytes = bytes_of(outcome);
    if (has(kStored) || !window->open()) {
      if (!has(kStored)) set(kStored, nb::borrow(store)(object()));
      nb::borrow(get(kStored)).attr("add")(outcome, nbytes);
      return;
    }
    window->hand_out(nbytes);
  }
  nb::borrow(get(kOnPartial))(outcome);
}

// A loop, since a reader may pass a response on as it gets it, which comes back here.
void InferRequest::hand_out_stored() {
  if (!has(kStored) || window->handing_out) return;
  window->handing_out = true;
  // It may be dropped meanwhile.
  const nb::object held = nb::borrow(object());
  struct Guard {
    ~Guard() { window.handing_out = false; }
    ResponseWindow& window;
  } guard{*window};
  while (has(kStored) && window->open()) {
    // The outcome, its bytes, and whether it is the last; None where nothing is left for now.
    const nb::object next = nb::borrow(get(kStored)).attr("take")();
    const bool last = !next.is_none() && nb::cast<bool>(nb::object(next[2]));
    if (next.is_none() || last) take(kStored);
    if (last) {
      finish(nb::object(next[0]));
    } else if (!next.is_none() && has(kOnPartial)) {
      window->hand_out(nb::cast<std::uint64_t>(nb::object(next[1])));
      nb::borrow(get(kOnPartial))(nb::object(next[0]));
    }
  }
}

void InferRequest::finish(nb::object outcome) {
  if (has(kStored)) {
    nb::borrow(get(kStored)).attr("end")(outcome);
    hand_out_stored();
    return;
  }
  const nb::object on_done = take(kOnDone);
  if (on_done.is_none()) return;
  // It may hold the request.
  const nb::object on_partial = take(kOnPartial);
  if (outcome.is_none() && on_partial.is_none()) {
    outcome = has(kFirst) ? nb::borrow(get(kFirst)) : nb::borrow(defaults().no_response);
  }
  on_done(outcome);
}

void InferRequest::cancel() {
  const nb::object stored = take(kStored);
  if (!stored.is_none()) stored.attr("close")();
  take(kOnDone);
  take(kOnPartial);
  if (has(kCancelled)) nb::borrow(get(kCancelled))(object());
}

std::string InferRequest::shown_identifier() const {
  constexpr Py_ssize_t kMost = 128;
  const nb::handle identifier = get(kIdentifier);
  if (!PyUnicode_Check(identifier.ptr())) return {};
  const nb::object begin = nb::steal(PyUnicode_Substring(identifier.ptr(), 0, kMost));
  if (!begin.is_valid()) throw nb::python_error();
  const auto text =
      nb::steal<nb::bytes>(PyUnicode_AsEncodedString(begin.ptr(), "utf-8", "replace"));
  if (!text.is_valid()) throw nb::python_error();
  return std::string(view_of(text));
}

nb::object make_infer_request(const RequestParts& parts) {
  nb::object made = allocate<InferRequest>(request_type());
  fill(*as<InferRequest>(made.ptr()), parts);
  return made;
}

nb::object make_infer_response(nb::handle kind, nb::handle signature, nb::handle shapes,
                               nb::handle buffers) {
  nb::object made = allocate<InferResponse>(reinterpret_cast<PyTypeObject*>(kind.ptr()));
  auto& response = *as<InferResponse>(made.ptr());
  response.set(InferResponse::kSignature, signature);
  response.set(InferResponse::kShapes, shapes);
  response.set(InferResponse::kBuffers, buffers);
  return made;
}

InferRequest& infer_request(nb::handle object) {
  return checked_as<InferRequest>(object, request_type(), "not an InferRequest");
}

InferResponse& infer_response(nb::handle object) {
  return checked_as<InferResponse>(object, response_type(), "not an InferResponse");
}

bool is_infer_response(nb::handle object) {
  return PyObject_TypeCheck(object.ptr(), response_type()) != 0;
}

void bind_infer_request(nb::module_& module) {
  module.attr("InferRequest") = nb::handle(reinterpret_cast<PyObject*>(request_type()));
  module.attr("InferResponseFields") = nb::handle(reinterpret_cast<PyObject*>(response_type()));
}

}  // namespace gpubridge
