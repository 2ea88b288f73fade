// Requests for the model from the records of an EXECUTE message.
#pragma once

#include "heap_type.h"
#include "ipc/context.h"
#include "ipc/records.h"
#include "ipc/records_binding.h"
#include "memory/lease_book.h"
#include "python_object.h"
#include "stub/request.h"
#include "stub/tensor.h"
#include "text.h"

namespace gpubridge::stub {

template <typename... Fields>
constexpr std::uint32_t bits_of(Fields... fields) {
  return (context_bit(fields) | ...);
}

// Fields of batches that run without Python.
inline constexpr std::uint32_t kPlainFields =
    bits_of(ContextField::kFlags, ContextField::kCorrelationId, ContextField::kCorrelationText,
            ContextField::kTimeout, ContextField::kParameters, ContextField::kTrace,
            ContextField::kTraceContext, ContextField::kShared, ContextField::kControls,
            ContextField::kOutputsFor, ContextField::kDevice, ContextField::kDeviceOutputs);
inline constexpr std::uint32_t kKnownFields =
    kPlainFields | bits_of(ContextField::kState, ContextField::kClient, ContextField::kWaits);

// Values that the requests of one model share.
struct ModelWords {
  nb::object name;
  nb::object version;
};

// Makes tensors of records, in memory that the server has lent.
class TensorReader {
 public:
  // `parse_signature` gives the Signature that bytes are; `outputs` holds the names of the outputs
  // that are sent for a request which names none.
  TensorReader(nb::object parse_signature, nb::object outputs, nb::type_object tensor,
               LeaseBook& book)
      : tensor_(std::move(tensor)),
        forms_(std::move(parse_signature), std::move(outputs)),
        book_(book) {}

  // The form of a record; throws MalformedRecord or a Python error where it has none.
  RecordForm& form(const RecordView& record) { return forms_.of(record); }

  // True if the memory of all tensors is there.
  [[nodiscard]] bool exists(const RecordView& record) const {
    for (std::size_t index = 0; index < record.tensors(); ++index) {
      if (!book_.exists(record.ref(index))) return false;
    }
    return true;
  }

  // A list of the tensors of a record whose memory is there.
  nb::object tensors(const RecordView& record, const RecordForm& form, bool read_only) {
    places_.clear();
    for (std::size_t index = 0; index < record.tensors(); ++index) {
      places_.push_back(record.ref(index));
    }
    std::vector<nb::object> lent = book_.lend(places_, read_only);
    const nb::handle specs = tuple_item(form.signature, 0);
    nb::object tensors = checked(PyList_New(static_cast<Py_ssize_t>(lent.size())));
    for (std::size_t index = 0; index < lent.size(); ++index) {
      const auto at = static_cast<Py_ssize_t>(index);
      const nb::handle spec = tuple_item(specs, at);
      nb::object tensor =
          received_tensor(type_of(tensor_), tuple_item(spec, 0), tuple_item(spec, 1),
                          tuple_item(form.shapes, at), std::move(lent[index]), &places_[index]);
      if (PyList_SetItem(tensors.ptr(), at, tensor.release().ptr()) != 0) throw nb::python_error();
    }
    return tensors;
  }

 protected:
  static PyTypeObject* type_of(const nb::type_object& type) {
    return reinterpret_cast<PyTypeObject*>(type.ptr());
  }

  nb::type_object tensor_;

 private:
  RecordForms forms_;
  LeaseBook& book_;
  std::vector<TensorRef> places_;
};

// Python objects that a reader of requests needs.
struct ReaderParts {
  nb::object make_origin;    // that of an Arrival
  nb::object make_controls;  // gives the control inputs that the text of a context says
  nb::object make_trace;     // gives the InferenceTrace of a number and a context
};

// Makes requests in memory that the server has lent.
class RequestReader : public TensorReader {
 public:
  RequestReader(TensorReader reader, ReaderParts parts, ModelWords model, nb::type_object request)
      : TensorReader(std::move(reader)),
        parts_(std::move(parts)),
        model_(std::move(model)),
        request_(std::move(request)) {}

  // The context of a request; throws MalformedContext.
  static Context context(const RecordView& record) {
    return Context::read(record.context(), kKnownFields);
  }

  // True if a request is of memory that is there, and nothing is said of it that only Python
  // knows.
  [[nodiscard]] bool is_plain(const RecordView& record, const Context& context) const {
    return (context.mask() & ~kPlainFields) == 0 && exists(record);
  }

  // Makes a request of a plain record; its inputs are read-only where others look at them.
  nb::object request(const RecordView& record, const RecordForm& form, nb::handle arrival) {
    const Context context = this->context(record);
    nb::object inputs = tensors(record, form, context.has(ContextField::kShared));
    if (context.has(ContextField::kControls)) {
      add_controls(context.text(ContextField::kControls), inputs);
    }
    Received received{.inputs = std::move(inputs),
                      .requested = form.wanted,
                      .model_name = model_.name,
                      .model_version = model_.version,
                      .arrival = nb::borrow(arrival)};
    if (!record.identifier().empty()) received.id = text_object(record.identifier());
    if (context.mask() != 0) take_context(context, received);
    return received_request(type_of(request_), received);
  }

  [[nodiscard]] nb::object arrival(nb::handle message, std::size_t at) const {
    return arrival_object({nb::borrow(message), at, parts_.make_origin});
  }

 private:
  static constexpr std::size_t kControlsKept = 1024;

  // A control input of a sequence, whose bytes each request gets for its own.
  struct Control {
    nb::object name;
    nb::object datatype;
    nb::object shape;
    nb::object bytes;
  };

  void take_context(const Context& context, Received& received) const {
    const auto number = [&](ContextField field, nb::object& to) {
      if (context.has(field)) to = nb::int_(context.number(field));
    };
    number(ContextField::kFlags, received.flags);
    number(ContextField::kTimeout, received.timeout);
    number(ContextField::kCorrelationId, received.correlation_id);
    if (context.has(ContextField::kCorrelationText)) {
      received.correlation_id = text_object(context.text(ContextField::kCorrelationText));
    }
    if (context.has(ContextField::kParameters)) {
      received.parameters = text_object(context.text(ContextField::kParameters));
    }
    if (context.has(ContextField::kTrace)) {
      received.trace = parts_.make_trace(context.number(ContextField::kTrace),
                                         text_object(context.text(ContextField::kTraceContext)));
    }
  }

  // Appends the control inputs that a context describes. Numbers are cached by the text, which
  // repeats within a sequence.
  void add_controls(std::string_view text, nb::handle inputs) {
    const auto add = [&](nb::object tensor) {
      if (PyList_Append(inputs.ptr(), tensor.ptr()) != 0) throw nb::python_error();
    };
    if (const auto found = controls_.find(text); found != controls_.end()) {
      for (const Control& control : found->second) {
        add(received_tensor(type_of(tensor_), control.name, control.datatype, control.shape,
                            checked(PyByteArray_FromObject(control.bytes.ptr())), nullptr));
      }
      return;
    }
    std::vector<Control> made;
    bool numbers = true;
    for (nb::handle tensor : nb::cast<nb::list>(parts_.make_controls(text_object(text)))) {
      const auto& fields = as<Tensor>(tensor.ptr())->fields;
      // Strings have been serialised.
      numbers = numbers && fields[kSource] == nullptr;
      if (numbers) {
        made.push_back({nb::borrow(fields[kName]), nb::borrow(fields[kDatatype]),
                        nb::borrow(fields[kShape]), checked(PyBytes_FromObject(fields[kArray]))});
      }
      add(nb::borrow(tensor));
    }
    if (!numbers) return;
    if (controls_.size() >= kControlsKept) controls_.clear();
    controls_.emplace(text, std::move(made));
  }

  ReaderParts parts_;
  ModelWords model_;
  nb::type_object request_;
  std::unordered_map<std::string, std::vector<Control>, TextHash, std::equal_to<>> controls_;
};

}  // namespace gpubridge::stub
