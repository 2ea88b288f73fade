#include "stub/request.h"

#include "heap_type.h"
#include "stub/tensor.h"

namespace gpubridge::stub {
namespace {

// The parameters of the constructor, in their order.
enum Argument : std::size_t {
  kIdGiven,
  kCorrelationGiven,
  kInputsGiven,
  kNamesGiven,
  kModelGiven,
  kVersionGiven,
  kFlagsGiven,
  kTimeoutGiven,
  kPreferredGiven,
  kTraceGiven,
  kParametersGiven,
  kArguments
};

constexpr std::array<const char*, kArguments> kArgumentNames = {
    "request_id",       "correlation_id", "inputs",    "requested_output_names",
    "model_name",       "model_version",  "flags",     "timeout",
    "preferred_memory", "trace",          "parameters"};

// Python objects that the type needs; live as long as the process.
struct Known {
  Known() {
    for (std::size_t index = 0; index < kArguments; ++index) {
      names.at(index) = PyUnicode_InternFromString(kArgumentNames.at(index));
    }
  }
  PyObject* init = nullptr;         // the reference's __init__
  PyObject* trace_class = nullptr;  // InferenceTrace
  PyObject* no_trace = nullptr;
  PyObject* empty = PyUnicode_InternFromString("");
  PyObject* no_parameters = PyUnicode_InternFromString("{}");
  PyObject* zero = PyLong_FromLong(0);
  PyObject* any_version = PyLong_FromLong(-1);
  std::array<PyObject*, kArguments> names{};
};

Known& known() {
  static auto* const instance = new Known();
  return *instance;
}

using Arguments = std::array<PyObject*, kArguments>;

// Sorts arguments by their parameters; false where one is unknown or given twice.
bool sort_arguments(PyObject* args, PyObject* keywords, Arguments& given) {
  const auto count = static_cast<std::size_t>(PyTuple_Size(args));
  if (count > kArguments) return false;
  for (std::size_t index = 0; index < count; ++index) {
    given.at(index) = PyTuple_GetItem(args, static_cast<Py_ssize_t>(index));
  }
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t at = 0;
  while (keywords != nullptr && PyDict_Next(keywords, &at, &key, &value) != 0) {
    std::size_t index = 0;
    // Keywords in source code are interned.
    while (index < kArguments && known().names.at(index) != key) ++index;
    if (index == kArguments || given.at(index) != nullptr) return false;
    given.at(index) = value;
  }
  return true;
}

bool is_plain_text(PyObject* text) { return PyUnicode_CheckExact(text) != 0 && is_ascii(text); }

// A plain int from `least` to `most`, or none.
bool is_within(PyObject* number, long long least, long long most) {
  if (PyLong_CheckExact(number) == 0) return false;
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
  return overflow == 0 && value >= least && value <= most;
}

nb::object usual_inputs(PyObject* given) {
  if (PyList_CheckExact(given) == 0) return {};
  nb::object inputs = checked(PyList_GetSlice(given, 0, PyList_Size(given)));
  for (nb::handle input : nb::borrow<nb::list>(inputs)) {
    if (!is_tensor(input.ptr()) || !is_initialized(as<Tensor>(input.ptr())) ||
        !is_ascii(as<Tensor>(input.ptr())->fields[kName])) {
      return {};
    }
  }
  return inputs;
}

nb::object usual_names(PyObject* given) {
  if (PyList_CheckExact(given) == 0 && PyAnySet_CheckExact(given) == 0) return {};
  nb::object names = checked(PyFrozenSet_New(given));
  for (nb::handle name : names) {
    if (!is_plain_text(name.ptr()) || PyUnicode_GetLength(name.ptr()) == 0) return {};
  }
  return names;
}

PyObject* given_or(PyObject* given, PyObject* fallback) {
  return given == nullptr ? fallback : given;
}

// Takes a request whose arguments are all of the usual types. False where the reference has to
// look.
bool take_usual(Request* request, PyObject* args, PyObject* keywords) {
  constexpr long long kMostFlags = (1LL << 32) - 1;
  constexpr long long kMost = (static_cast<unsigned long long>(1) << 63) - 1;
  const Known& python = known();
  Arguments given{};
  if (!sort_arguments(args, keywords, given)) return false;
  PyObject* id = given_or(given[kIdGiven], python.empty);
  PyObject* correlation = given_or(given[kCorrelationGiven], python.zero);
  PyObject* version = given_or(given[kVersionGiven], python.any_version);
  PyObject* flags = given_or(given[kFlagsGiven], python.zero);
  PyObject* timeout = given_or(given[kTimeoutGiven], python.zero);
  PyObject* trace = given_or(given[kTraceGiven], python.no_trace);
  if (given[kInputsGiven] == nullptr || given[kNamesGiven] == nullptr ||
      given[kModelGiven] == nullptr || given[kPreferredGiven] != nullptr ||
      (given[kParametersGiven] != nullptr && given[kParametersGiven] != Py_None) ||
      !is_plain_text(id) || !is_plain_text(given[kModelGiven]) ||
      !is_within(correlation, 0, kMost) || !is_within(version, -1, kMostFlags) ||
      !is_within(flags, 0, kMostFlags) || !is_within(timeout, 0, kMost) ||
      reinterpret_cast<PyObject*>(Py_TYPE(trace)) != python.trace_class) {
    return false;
  }
  nb::object inputs = usual_inputs(given[kInputsGiven]);
  nb::object names;
  if (inputs.is_valid()) names = usual_names(given[kNamesGiven]);
  if (!names.is_valid()) return false;
  auto& fields = request->fields;
  give(fields[kInputs], std::move(inputs));
  give(fields[kRequested], std::move(names));
  assign(fields[kRequestId], id);
  assign(fields[kCorrelationId], correlation);
  assign(fields[kFlags], flags);
  assign(fields[kTimeout], timeout);
  assign(fields[kRequestParameters], python.no_parameters);
  assign(fields[kModelName], given[kModelGiven]);
  assign(fields[kModelVersion], version);
  assign(fields[kOrigin], Py_None);
  assign(fields[kTrace], trace);
  assign(fields[kPreferredMemory], Py_None);
  assign(fields[kReleaseFlags], python.zero);
  return true;
}

int initialize(PyObject* self, PyObject* args, PyObject* keywords) {
  return guarded(-1, [&] {
    if (take_usual(as<Request>(self), args, keywords)) return 0;
    return initialize_in_python(known().init, self, args, keywords);
  });
}

PyObject* requested_output_names(PyObject* self, PyObject* /*unused*/) {
  PyObject* names = field<Request>(self, kRequested);
  return names == nullptr ? nullptr : PySet_New(names);
}

PyObject* get_origin(PyObject* self, void* /*unused*/) {
  auto& fields = as<Request>(self)->fields;
  if (fields[kOrigin] != nullptr) return Py_NewRef(fields[kOrigin]);
  if (fields[kArrival] == nullptr) return Py_NewRef(Py_None);
  return guarded(static_cast<PyObject*>(nullptr),
                 [&] { return arrival_of(fields[kArrival]).ask().release().ptr(); });
}

int set_origin(PyObject* self, PyObject* value, void* /*unused*/) {
  assign(as<Request>(self)->fields[kOrigin], value);
  return 0;
}

PyMethodDef methods[] = {
    // NOLINT: the C API's own form
    {"inputs", give_list<Request, kInputs>, METH_NOARGS, "Give the input tensors as a new list."},
    {"request_id", give_field<Request, kRequestId>, METH_NOARGS,
     "Give the id the client chose, or an empty str."},
    {"correlation_id", give_field<Request, kCorrelationId>, METH_NOARGS,
     "Give the sequence's id; 0 is none."},
    {"flags", give_field<Request, kFlags>, METH_NOARGS,
     "Give the ``TRITONSERVER_REQUEST_FLAG_...`` bits."},
    {"timeout", give_field<Request, kTimeout>, METH_NOARGS,
     "Give the time limit in microseconds; 0 is none."},
    {"parameters", give_field<Request, kRequestParameters>, METH_NOARGS,
     "Give the parameters as JSON text."},
    {"trace", give_field<Request, kTrace>, METH_NOARGS,
     "Give the trace, for the requests that this one causes."},
    {"requested_output_names", requested_output_names, METH_NOARGS,
     "Give the names of the outputs asked for, as a new set."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef properties[] = {// NOLINT
                            {"_handle", get_origin, set_origin, nullptr, nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

PyTypeObject* request_type() {
  static PyTypeObject* const type = fields_type<Request>(
      "gpubridge._native.RequestFields",
      {{Py_tp_init, slot(initialize)},
       {Py_tp_methods, methods},
       {Py_tp_members, field_members<Request>(
                           {"_inputs", "_request_id", "_correlation_id", "_requested_output_names",
                            "_flags", "_timeout", "_parameters", "_model_name", "_model_version",
                            nullptr, "_trace", "_preferred_memory", "_release_flags"})},
       {Py_tp_getset, properties}});
  return type;
}

// -- arrivals

nb::object arrival_object(Arrival arrival) {
  static PyTypeObject* const type = boxed_type<Arrival>("gpubridge._native.Arrival");
  return box(type, std::move(arrival));
}

Arrival& arrival_of(nb::handle object) { return unboxed<Arrival>(object.ptr()); }

nb::object Arrival::ask() {
  if (!origin.is_valid()) {
    nb::object made = make_origin(message, at);
    if (!origin.is_valid()) {
      if (cancelled) made.attr("was_cancelled") = *cancelled;
      origin = std::move(made);
    } else {
      // Another thread was first: the end of this one is not that of the request.
      made.attr("close")();
    }
  }
  return origin;
}

// -- requests that arrived

nb::object received_request(PyTypeObject* kind, const Received& received) {
  const Known& python = known();
  nb::object made = allocate<Request>(kind);
  auto& fields = as<Request>(made.ptr())->fields;
  const auto put = [&](RequestField field, nb::handle value, PyObject* otherwise) {
    assign(fields[field], value.is_valid() ? value.ptr() : otherwise);
  };
  put(kInputs, received.inputs, nullptr);
  put(kRequestId, received.id, python.empty);
  put(kCorrelationId, received.correlation_id, python.zero);
  put(kRequested, received.requested, nullptr);
  put(kFlags, received.flags, python.zero);
  put(kTimeout, received.timeout, python.zero);
  put(kRequestParameters, received.parameters, python.no_parameters);
  put(kModelName, received.model_name, nullptr);
  put(kModelVersion, received.model_version, nullptr);
  put(kTrace, received.trace, python.no_trace);
  put(kPreferredMemory, {}, Py_None);
  put(kReleaseFlags, {}, python.zero);
  put(kArrival, received.arrival, nullptr);
  return made;
}

bool is_no_trace(PyObject* trace) { return trace == known().no_trace; }

void use_request_reference(nb::handle reference) {
  const nb::module_ fields = nb::module_::import_("gpubridge.pb_utils.request");
  known().init = kept_attribute(reference, "__init__");
  const nb::module_ traces = nb::module_::import_("gpubridge.pb_utils.trace");
  known().trace_class = kept_attribute(traces, "InferenceTrace");
  known().no_trace = kept_attribute(traces, "NO_TRACE");
}

}  // namespace gpubridge::stub
