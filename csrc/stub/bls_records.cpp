// Records of a model's calls of other models, and of the responses to them.

#include "stub/bls_records.h"

#include "buffer_view.h"
#include "heap_type.h"
#include "ipc/datagrams.h"
#include "ipc/messages.h"
#include "list_items.h"
#include "stub/output_pool.h"
#include "stub/request.h"
#include "stub/response.h"
#include "stub/tensor.h"

namespace gpubridge {
namespace stub {
namespace {

// As gpubridge/transport/calls.py and messages.py describe them.
constexpr std::size_t kFrameHead = 8;
// As gpubridge/transport/leases.py has it.
constexpr std::uint64_t kReadOnly = 1U << 30U;
constexpr std::size_t kFieldsPerRef = 4;
// Of a tensor of strings.
constexpr auto kAnySize = std::numeric_limits<std::uint64_t>::max();
constexpr std::size_t kKept = 512;
constexpr char kCall = 1;
// As gpubridge/transport/context.py has it: the server reads longer texts where a call is alone.
constexpr Py_ssize_t kLongText = 64L * 1024;

// True if a request has something to say that most calls have not.
bool is_special(const Request* request) {
  for (std::size_t field = 0; field < kReleaseFlags; ++field) {
    if (request->fields[field] == nullptr && field != kOrigin) return true;
  }
  for (const RequestField field : {kCorrelationId, kFlags, kTimeout}) {
    const int said = PyObject_IsTrue(request->fields[field]);
    if (said < 0) throw nb::python_error();
    if (said != 0) return true;
  }
  PyObject* const model = request->fields[kModelName];
  if (PyUnicode_Check(model) == 0 || PyUnicode_GetLength(model) > kLongText) return true;
  return request->fields[kPreferredMemory] != Py_None ||
         PyUnicode_CompareWithASCIIString(request->fields[kRequestParameters], "{}") != 0 ||
         !is_no_trace(request->fields[kTrace]);
}

}  // namespace

// Encodes calls that say no more than which model they are for and which outputs are wanted.
class CallWriter {
 public:
  // `describe` gives the signature and the context of a call; `references` says where tensors lie
  // that are in no shared memory yet, for a model, as the fields of all references one after
  // another.
  CallWriter(nb::object describe, nb::object references, nb::type_object tensor, nb::object pool)
      : describe_(std::move(describe)),
        references_(std::move(references)),
        tensor_(std::move(tensor)),
        pool_object_(std::move(pool)) {}

  // The record of a call; None where it is left to Python.
  nb::object write(std::uint32_t number, nb::handle request, bool decoupled) {
    std::string record;
    return append(record, number, request, decoupled) ? nb::object(bytes_object(record))
                                                      : nb::none();
  }

  // Sends a call, made for the requests of `batch`, unless `outbox` has others that are not sent
  // yet: returns no bytes where it is sent, else what `write` does. `call` is a Call
  // (gpubridge/stub/bls/calls.py), `calls` has those under way by their numbers. No Python code, so
  // no other thread and no signal's handler, comes between the look and the end.
  nb::object send(nb::handle outbox, nb::handle calls, nb::handle call, nb::handle request,
                  bool decoupled, std::uint64_t batch) {
    const nb::object number = attribute<"number">(call);
    std::string message(kFrameHead, '\0');
    message[0] = kCall;
    put_number(message.data() + 4, std::uint32_t{1});
    append_number(message, batch);
    const std::size_t head = message.size();
    if (!append(message, nb::cast<std::uint32_t>(number), request, decoupled)) return nb::none();
    const auto record = [&] { return bytes_object(std::string_view(message).substr(head)); };
    const nb::object descriptor = attribute<"direct">(outbox);
    if (descriptor.is_none() || static_cast<Py_ssize_t>(message.size()) > kLongText)
      return record();
    if (PyObject_SetItem(calls.ptr(), number.ptr(), call.ptr()) != 0) throw nb::python_error();
    if (!send_datagram(nb::cast<int>(descriptor), message)) {
      // Python finds out why.
      if (PyObject_DelItem(calls.ptr(), number.ptr()) != 0) throw nb::python_error();
      return record();
    }
    set_attribute<"sent">(call, nb::bool_(true));
    return nb::bytes("");
  }

 private:
  // Appends the record of a call; false where it is left to Python.
  bool append(std::string& record, std::uint32_t number, nb::handle request, bool decoupled) {
    Call call;
    RecordParts parts;
    try {
      if (!read(request, call)) return false;
      describe(request, decoupled, call, parts);
    } catch (nb::python_error&) {
      // The same happens to Python, which words it.
      return false;
    }
    parts.ticket = number;
    char* at = parts.append_to(record);
    const nb::object model = nb::borrow(as<Request>(request.ptr())->fields[kModelName]);
    std::vector<TensorRef> refs(call.inputs.size(), TensorRef{0, 0, 0, kNoLease});
    if (!place(call, model, refs)) {
      const auto fields = nb::cast<nb::list>(references_(list_of(call.inputs), model));
      if (fields.size() != kFieldsPerRef * refs.size()) throw nb::value_error("references");
      for (std::size_t index = 0; index < refs.size(); ++index) {
        refs[index] = ref_at(fields, kFieldsPerRef * index);
      }
    }
    for (const TensorRef& ref : refs) at = write_ref(at, ref);
    return true;
  }

  struct Known {
    std::string signature;
    std::string context;
    std::vector<std::uint64_t> itemsizes;  // of an element of each input, 0 for BYTES
  };

  struct Call {
    // Those of now: another thread may initialize the request anew.
    std::vector<nb::object> inputs;
    SignatureKey key;
    std::vector<std::uint64_t> sizes;  // of each input: elements, then bytes or kAnySize
    bool handed_on = false;            // whether some tensors are in shared memory
  };

  // Takes what a call says; false where Python has to look.
  bool read(nb::handle request, Call& call) {
    if (PyObject_TypeCheck(request.ptr(), request_type()) == 0) return false;
    const auto* said = as<Request>(request.ptr());
    if (is_special(said) || PyList_CheckExact(said->fields[kInputs]) == 0) return false;
    call.inputs = items_of(said->fields[kInputs]);
    for (const nb::object& input : call.inputs) {
      if (!is_tensor(input.ptr())) return false;
      const auto* tensor = as<Tensor>(input.ptr());
      if (!is_initialized(tensor)) return false;
      // Tensors of derived classes may be elsewhere.
      if (!tensor->placed && nb::handle(input.type()).ptr() != tensor_.ptr()) return false;
      call.handed_on = call.handed_on || tensor->placed;
      call.sizes.push_back(
          call.key.add(tensor->fields[kName], tensor->fields[kDatatype], tensor->fields[kShape]));
    }
    return true;
  }

  // Everything of the record but its number and its references.
  void describe(nb::handle request, bool decoupled, Call& call, RecordParts& parts) {
    const auto& fields = as<Request>(request.ptr())->fields;
    const Known& form = known(request, decoupled, call);
    Py_ssize_t size = 0;
    const char* id = PyUnicode_AsUTF8AndSize(fields[kRequestId], &size);
    if (id == nullptr) throw nb::python_error();
    parts.tensors = static_cast<std::uint32_t>(call.inputs.size());
    parts.signature = form.signature;
    parts.context = form.context;
    parts.identifier = {id, static_cast<std::size_t>(size)};
    parts.dims = call.key.dims;
    for (std::size_t index = 0; index < call.sizes.size(); ++index) {
      const std::uint64_t itemsize = form.itemsizes[index];
      call.sizes[index] = itemsize == 0 ? kAnySize : itemsize * call.sizes[index];
    }
  }

  // Puts where the inputs of a call lie in `refs`; those that are in no shared memory are copied
  // there, for the processes of a model. False where that is left to Python.
  bool place(const Call& call, nb::handle model, std::span<TensorRef> refs) {
    std::vector<BufferView> held;
    std::vector<OutputPool::Piece> pieces;
    held.reserve(refs.size());
    pieces.reserve(refs.size());
    std::size_t total = 0;
    for (std::size_t index = 0; index < refs.size(); ++index) {
      const auto* tensor = as<Tensor>(call.inputs[index].ptr());
      if (tensor->placed) {
        refs[index] = tensor->place;
        continue;
      }
      const nb::object from = nb::borrow(exporter(tensor));
      if (!from.is_valid()) return false;
      try {
        held.emplace_back(from, PyBUF_SIMPLE);
      } catch (nb::python_error&) {
        // As of ml_dtypes' bfloat16, which has no buffer format.
        return false;
      }
      const std::size_t size = held.back().size();
      // The model may have resized an array that it had made a tensor of.
      if (call.sizes[index] != kAnySize && call.sizes[index] != size) return false;
      pieces.push_back({index, static_cast<const char*>(held.back().data()), size});
      total += OutputPool::aligned(size);
    }
    if (total > OutputPool::kMostBytes) return false;
    if (total != 0) pool_.count(pool_.copy(pieces, view_of_text(model), refs));
    return true;
  }

  const Known& known(nb::handle request, bool decoupled, const Call& call) {
    const std::string key = key_of(request, decoupled, call);
    const auto found = known_.find(key);
    if (found != known_.end()) return found->second;
    const auto encoded = nb::cast<nb::tuple>(describe_(request, decoupled));
    Known made{std::string(view_of_bytes(encoded[0])),
               std::string(view_of_bytes(nb::object(encoded[1].attr("encoded")()))),
               {}};
    for (const nb::object& input : call.inputs) {
      const nb::object size = item_size_(nb::handle(as<Tensor>(input.ptr())->fields[kDatatype]));
      made.itemsizes.push_back(size.is_none() ? 0 : nb::cast<std::uint64_t>(size));
    }
    // Another thread may have initialized the request anew meanwhile: it is left to Python then.
    if (Call now; !read(request, now) || key_of(request, decoupled, now) != key) {
      PyErr_SetString(PyExc_RuntimeError, "the request has changed");
      throw nb::python_error();
    }
    if (known_.size() >= kKept) known_.clear();
    return known_.emplace(key, std::move(made)).first->second;
  }

  // The key of what `describe_` says of a call.
  static std::string key_of(nb::handle request, bool decoupled, const Call& call) {
    SignatureKey key{call.key.kinds, {}};
    const auto& fields = as<Request>(request.ptr())->fields;
    key.add_text(fields[kModelName]);
    for (nb::handle name : nb::borrow(fields[kRequested])) key.add_text(name.ptr());
    append_number(key.kinds, nb::cast<std::int64_t>(nb::handle(fields[kModelVersion])));
    append_number(key.kinds, static_cast<std::uint32_t>(call.inputs.size()));
    key.kinds += {decoupled ? '\1' : '\0', call.handed_on ? '\1' : '\0'};
    return key.kinds;
  }

  nb::object describe_;
  nb::object references_;
  nb::object item_size_ = nb::module_::import_("gpubridge.tensor.datatypes").attr("item_size");
  nb::type_object tensor_;
  nb::object pool_object_;
  OutputPool& pool_ = nb::cast<OutputPool&>(pool_object_);
  std::unordered_map<std::string, Known> known_;
};

// Says what came of each record of a message; throws MalformedRecord.
std::vector<CallResponse> CallResponseReader::responses(const nb::bytes& message) {
  std::vector<CallResponse> responses;
  std::size_t at = kFrameHead;
  for (const RecordView& record : decode_call_responses(view_of_bytes(message))) {
    nb::object made = nb::none();
    if ((record.word() & kResponseEmpty) == 0) made = response(message, record, at);
    responses.push_back({record.ticket(), record.word(), std::move(made)});
    at += record.size();
  }
  return responses;
}

nb::object CallResponseReader::response(const nb::bytes& message, const RecordView& record,
                                        std::size_t at) {
  bool plain = (record.word() & kResponseError) == 0 && record.context().empty();
  for (std::size_t index = 0; plain && index < record.tensors(); ++index) {
    plain = (record.ref(index).region & kReadOnly) == 0;
  }
  if (!plain || !reader_.exists(record)) return fall_back_(message, at);
  const RecordForm& form = reader_.form(record);
  return received_response(reinterpret_cast<PyTypeObject*>(response_.ptr()),
                           reader_.tensors(record, form, false));
}

}  // namespace stub

void bind_bls_records(nb::module_& module) {
  using namespace stub;
  nb::class_<CallWriter>(module, "CallWriter")
      .def(nb::init<nb::object, nb::object, nb::type_object, nb::object>())
      .def("write", &CallWriter::write)
      .def("send", &CallWriter::send);
  nb::class_<CallResponseReader>(module, "CallResponseReader")
      .def(
          "__init__",
          [](CallResponseReader* place, nb::object parse_signature, nb::type_object tensor,
             nb::type_object response, LeaseBook& book, nb::object fall_back) {
            new (place) CallResponseReader(
                TensorReader(std::move(parse_signature), nb::none(), std::move(tensor), book),
                std::move(response), std::move(fall_back));
          },
          nb::keep_alive<1, 5>())
      .def("read", [](CallResponseReader& self, const nb::bytes& message) {
        nb::list responses;
        for (CallResponse& each : self.responses(message)) {
          responses.append(nb::make_tuple(each.number, each.flags, std::move(each.response)));
        }
        return responses;
      });
}

}  // namespace gpubridge
