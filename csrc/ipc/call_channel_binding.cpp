// The calls of a stub's model: from the message that brings them to the called models, and back to
// the message with the answers. gpubridge/_native.pyi says what the parts mean.

#include <cerrno>

#include "heap_type.h"
#include "ipc/context.h"
#include "ipc/in_flight_binding.h"
#include "ipc/messages.h"
#include "ipc/records_binding.h"
#include "memory/kept_bytes.h"
#include "python_object.h"

namespace gpubridge {
namespace {

// As gpubridge/transport/calls.py and messages.py have them.
constexpr char kCall = 1;
constexpr char kCallResponses = 16;
constexpr std::size_t kFrame = 8;
constexpr std::size_t kFormsKept = 512;
constexpr std::size_t kSignaturesKept = 256;
constexpr std::size_t kShortContext = 256;
// What an open call keeps beside its tensors, about.
constexpr std::uint64_t kOfCall = 1024;
// In the number of a call's batch: its `execute` is blocked until the call is answered.
constexpr std::uint64_t kBlocks = std::uint64_t{1} << 63U;

// The fields of a Record (gpubridge/transport/records.py).
enum RecordField : Py_ssize_t { kTicket, kSignature, kShapes, kContext, kWord, kIdentifier, kRefs };

std::string encoded_dims(nb::handle shapes) {
  std::string dims;
  for (nb::handle shape : shapes) {
    for (nb::handle dim : shape) {
      append_number(dims, nb::cast<std::int64_t>(dim));
    }
  }

  return dims;
}

// Notes that who has such counts waits for a call of these models more, or less.
void wait_for(nb::handle counted, nb::handle models, long change) {
  for (nb::handle name : models) {
    PyObject* const count = PyDict_GetItemWithError(counted.ptr(), name.ptr());
    if (count == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
    const long left = (count == nullptr ? 0 : PyLong_AsLong(count)) + change;
    int failed = 0;
    if (left > 0) {
      failed = PyDict_SetItem(counted.ptr(), name.ptr(), nb::int_(left).ptr());
    } else if (count != nullptr) {
      failed = PyDict_DelItem(counted.ptr(), name.ptr());
    }
    if (failed != 0) throw nb::python_error();
  }
}

// Context of an error (a BridgeError), without its text if that is long.
std::string encoded_error(nb::handle error, bool is_long) {
  const nb::object message = is_long ? nb::str("") : attribute<"message">(error);
  // Models make texts with lone surrogates, which are no Unicode.
  const nb::object text = checked(PyUnicode_AsEncodedString(message.ptr(), "utf-8", "replace"));
  Context context;
  if (!view_of_bytes(text).empty()) context.set_text(ContextField::kError, view_of_bytes(text));
  context.set_number(ContextField::kCode,
                     nb::cast<std::uint64_t>(nb::int_(attribute<"code">(error))));
  return context.encoded();
}

}  // namespace

class CallChannel;

// Values that calls of one signature and context share; `given` is a CallForm
// (gpubridge/frontend/bls/requests.py).
struct KnownCall {
  KnownCall(nb::object form, nb::handle caller) : given(std::move(form)) {
    for (nb::handle name : needed) {
      auto& dicts = waiting.emplace_back();
      for (nb::handle instance : given.attr("instances")(name)) {
        if (!instance.is(caller)) dicts.push_back(instance.attr("waits_for"));
      }
    }
  }

  // True if some instance of each model that is needed waits for no call itself.
  [[nodiscard]] bool can_end() const {
    return std::all_of(waiting.begin(), waiting.end(), [](const auto& dicts) {
      return std::any_of(dicts.begin(), dicts.end(),
                         [](const nb::object& dict) { return nb::len(dict) == 0; });
    });
  }

  nb::object given;
  nb::object submit = given.attr("submit");
  nb::object home = given.attr("home");
  nb::object context = given.attr("context");
  nb::object shared = given.attr("shared");
  nb::object origin = given.attr("origin");
  nb::object needed = given.attr("needed");
  nb::object counts_object = given.attr("counts");
  CallCounts& counts = nb::cast<CallCounts&>(counts_object);
  bool decoupled = nb::cast<bool>(given.attr("decoupled"));
  // Returns the signature and the shapes of a response as callers see them; None where those are
  // the model's own.
  nb::object reshape = given.attr("reshape");
  // Of each needed model, what its instances wait for; but for the caller.
  std::vector<std::vector<nb::object>> waiting;
  // Of the last call, since the next mostly has the same.
  nb::object shapes;
  std::vector<std::uint64_t> sizes;
  nb::object fitted;
};

// A call on its way; it gets the outcome of its request.
struct Call {
  void respond(nb::object outcome);
  void answer(nb::handle outcome);
  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(request.ptr());
    return 0;
  }
  void clear() { request.reset(); }

  CallChannel* channel;  // null when that is closed, or the call has ended
  std::uint32_t number;
  std::uint64_t batch;  // of the caller's requests that it is made for; 0 for none
  bool blocks;          // whether that batch's `execute` is known to wait for it
  std::shared_ptr<KnownCall> form;
  std::int64_t begun;  // when, in nanoseconds of CLOCK_MONOTONIC
  nb::object request;
};

class CallChannel {
 public:
  // `requests` are those at the stub, `descriptor` is the channel's, which stays the caller's.
  CallChannel(nb::object requests, nb::object reader, nb::handle hooks, int descriptor)
      : requests_object_(std::move(requests)),
        requests_(nb::cast<at_stub::RequestsAtStub&>(requests_object_)),
        reader_object_(std::move(reader)),
        reader_(nb::cast<RecordReader&>(reader_object_)),
        hooks_(std::make_shared<const Hooks>(hooks)),
        descriptor_(descriptor) {}
  CallChannel(const CallChannel&) = delete;
  CallChannel& operator=(const CallChannel&) = delete;
  ~CallChannel() { close(); }

  // Takes one message; returns whether there was one.
  bool receive() {
    const auto hooks = hooks_;
    if (hooks == nullptr) return false;
    // Of all channels: nothing looks at a message any more when Python is called for it.
    static auto* const memory = new std::vector<char>(kDatagramLimit);
    const Datagram datagram = receive_now(descriptor_, *memory);
    if (datagram.count < 0 && errno == EAGAIN) return false;
    const auto size = static_cast<std::size_t>(std::max<std::ptrdiff_t>(datagram.count, 0));
    const std::string_view message(memory->data(), size);
    if (datagram.cut || !datagram.descriptors.empty() || size < kFrame || message[0] != kCall) {
      hooks->receive(nb::bytes(message.data(), size), descriptors_of(datagram), datagram.cut);
      return true;
    }
    nb::list records;
    std::vector<std::uint64_t> batches;
    try {
      CallsMessage calls = decode_calls(message);
      batches = std::move(calls.batches);
      for (const RecordView& record : calls.records) records.append(reader_.record(record));
    } catch (const std::invalid_argument& error) {
      hooks->refuse(text_object(std::string("message of calls: ") + error.what()));
      return true;
    } catch (nb::python_error& error) {
      hooks->refuse(error.value());
      return true;
    }
    take(records, batches);
    return true;
  }

  // Gives calls, each made for requests of a batch, to the called models.
  void take(const nb::list& records, const std::vector<std::uint64_t>& batches) {
    const auto hooks = hooks_;
    if (hooks == nullptr) return;
    if (BusyPoll* poll = requests_.busy_poll()) poll->paused();
    try {
      for (std::size_t index = 0; index < batches.size(); ++index) {
        begin(*hooks, nb::object(records[index]), batches[index]);
      }
    } catch (const std::invalid_argument& error) {
      hooks->refuse(error.what());
    } catch (nb::python_error& error) {
      hooks->refuse(error.value());
    }
  }

  // Sends what has been answered in this turn of the event loop, in one message.
  void flush() {
    const auto hooks = hooks_;
    if (answered_ == 0 || hooks == nullptr) return;
    std::string message(kFrame, '\0');
    message[0] = kCallResponses;
    put_number(message.data() + 4, std::exchange(answered_, 0));
    message += std::exchange(answers_, {});
    const bool direct = !blocked_ && message.size() <= kDatagramLimit;
    if (direct && send_datagram(descriptor_, message)) return;
    hooks->send(bytes_object(message));
  }

  // Answers a call that is under way, if it is.
  void end(std::uint32_t number, nb::object outcome) {
    const auto hooks = hooks_;
    const auto node = calls_.extract(number);
    if (hooks == nullptr || node.empty()) return;
    Call& call = nb::cast<Call&>(node.mapped());
    call.channel = nullptr;
    call.form->counts.add(static_cast<Duration>(monotonic_ns() - call.begun));
    call.request.reset();
    charge_kept(*hooks);
    answer(*hooks, number, std::move(outcome), 0, call.form.get());
    if (call.batch != 0) wait_for(hooks->waits_for, call.form->needed, -1);
  }

  void respond(const Call& call, nb::object outcome) {
    const auto hooks = hooks_;
    const auto form = call.form;
    if (hooks) answer(*hooks, call.number, std::move(outcome), kResponseOpen, form.get());
  }

  void forget() { known_.clear(); }
  void block(bool blocked) { blocked_ = blocked; }
  [[nodiscard]] nb::object call(std::uint32_t number) const {
    const auto found = calls_.find(number);
    return found == calls_.end() ? nb::none() : found->second;
  }
  // Bytes that the open calls keep beside their tensors.
  [[nodiscard]] std::uint64_t kept() const { return calls_.size() * kOfCall; }
  // Answers nothing any more.
  void mute() { mute_ = true; }
  // Is of no use any more; returns the calls that are under way.
  nb::list close() {
    nb::list calls = this->calls();
    for (nb::handle call : calls) nb::cast<Call&>(call).channel = nullptr;
    calls_.clear();
    known_.clear();
    hooks_.reset();
    return calls;
  }

  [[nodiscard]] nb::list calls() const {
    nb::list calls;
    for (const auto& [number, call] : calls_) calls.append(call);
    return calls;
  }

  KeptCharge charge;

 private:
  struct Hooks {
    explicit Hooks(nb::handle hooks) : given(nb::borrow(hooks)) {}

    nb::object given;
    RegionNames names{given.attr("announcer")};
    nb::object caller = given.attr("caller");
    nb::object model = caller.attr("settings").attr("model");
    nb::object waits_for = caller.attr("waits_for");
    nb::object connection = given.attr("connection");
    nb::object form = given.attr("form");
    nb::object check = given.attr("check");
    nb::object failed = given.attr("failed");
    nb::object describe = given.attr("describe");
    nb::object long_text = given.attr("long_text");
    nb::object send_long = given.attr("send_long");
    nb::object signature = given.attr("signature");
    nb::object receive = given.attr("receive");
    nb::object refuse = given.attr("refuse");
    nb::object send = given.attr("send");
    nb::object call_soon = given.attr("call_soon");
    nb::object charged = given.attr("charged");
    nb::object charge = charged.attr("charge");
    nb::object raise_shortage = charged.attr("raise_shortage");
    nb::object account = connection.attr("account");
  };
  using Key = std::pair<PyObject*, PyObject*>;
  struct KeyHash {
    std::size_t operator()(const Key& key) const {
      return std::hash<PyObject*>{}(key.first) * 31 + std::hash<PyObject*>{}(key.second);
    }
  };
  // The signature and the context of calls, and what they say.
  struct Kept {
    nb::object signature;
    nb::object context;
    std::shared_ptr<KnownCall> form;
  };

  void begin(const Hooks& hooks, nb::handle record, std::uint64_t batch) {
    const auto number = nb::cast<std::uint32_t>(tuple_item(record, kTicket));
    if (calls_.contains(number)) {
      throw MalformedRecord("call " + std::to_string(number) + ", which there is already");
    }
    try {
      // Also of one that is refused, so that its leases end.
      const nb::object ranges = this->ranges(hooks, record);
      if (charge.refuses(kept())) hooks.raise_shortage(calls_.size(), kept());
      submit(hooks, number, record, batch, ranges);
    } catch (nb::python_error& error) {
      const bool begun = calls_.contains(number);
      nb::object outcome = hooks.failed(record, error.value(), begun);
      if (begun) {
        end(number, std::move(outcome));
      } else {
        answer(hooks, number, std::move(outcome), 0, nullptr);
      }
    }
  }

  void submit(const Hooks& hooks, std::uint32_t number, nb::handle record, std::uint64_t word,
              const nb::object& ranges) {
    const std::uint64_t batch = word & ~kBlocks;
    const std::shared_ptr<KnownCall> form = this->form(hooks, record);
    std::vector<std::uint64_t> sizes;
    any_range(ranges, [&](const RangeView& range) {
      sizes.push_back(range.nbytes);
      return false;
    });
    const nb::handle shapes = tuple_item(record, kShapes);
    if (!form->shapes.is(shapes) || form->sizes != sizes) {
      nb::list listed;
      for (const std::uint64_t size : sizes) listed.append(size);
      form->fitted = attribute<"fit">(form->given)(record, listed);
      form->shapes = nb::borrow(shapes);
      form->sizes = std::move(sizes);
    }
    const nb::object call =
        nb::cast(Call{this, number, batch, (word & kBlocks) != 0, form, monotonic_ns(), {}});
    // The signature, the dims, the batch size and the options of requests.
    const nb::object fitted = form->fitted;
    const nb::object request = make_infer_request(
        {.signature = tuple_item(fitted, 0).ptr(),
         .on_done = call.ptr(),
         .identifier = tuple_item(record, kIdentifier).ptr(),
         .context = for_others(ranges, form->home) ? form->shared.ptr() : form->context.ptr(),
         .options = tuple_item(fitted, 3).ptr(),
         .dims = tuple_item(fitted, 1).ptr(),
         .batch_size = nb::cast<long long>(tuple_item(fitted, 2))});
    infer_request(request).set(InferRequest::kRanges, ranges);
    if (form->decoupled) {
      infer_request(request).set(InferRequest::kAccount, hooks.account);
      infer_request(request).set(InferRequest::kOnPartial, attribute<"respond">(call));
    }
    nb::cast<Call&>(call).request = request;
    calls_.emplace(number, call);
    charge_kept(hooks);
    // One that is made for no batch blocks none.
    if (batch != 0) wait_for(hooks.waits_for, form->needed, 1);
    form->submit(request,
                 form->origin.is_none() ? attribute<"cause">(form->given)() : form->origin);
    if (batch != 0 && !form->can_end() && calls_.contains(number)) hooks.check(call);
  }

  void charge_kept(const Hooks& hooks) {
    if (const auto due = charge.due(kept())) {
      charge.settle(*due, nb::cast<std::uint64_t>(hooks.charge(*due)));
    }
  }

  nb::object ranges(const Hooks& hooks, nb::handle record) {
    const auto* refs = TensorRefs::of(tuple_item(record, kRefs));
    if (refs == nullptr) throw nb::type_error("expected the references of a record");
    const std::vector<TensorRef> places(refs->begin(), refs->end());
    nb::object ranges;
    try {
      ranges = requests_.ranges(places);
    } catch (const MalformedRecord&) {
      // The stub may have announced that memory, through its other channel, a moment ago.
      attribute<"catch_up">(hooks.connection)();
      ranges = requests_.ranges(places);
    }
    if (attribute<"device">(hooks.connection).is_none()) return ranges;
    const nb::object listed = checked(PySequence_List(ranges.ptr()));
    return attribute<"called">(hooks.connection)(listed, record);
  }

  std::shared_ptr<KnownCall> form(const Hooks& hooks, nb::handle record) {
    // Records with equal signatures or contexts mostly have the same objects, which are held, so
    // that nothing else gets their addresses.
    const nb::object signature = nb::borrow(tuple_item(record, kSignature));
    const nb::object context = nb::borrow(tuple_item(record, kContext));
    const Key key{signature.ptr(), context.ptr()};
    if (const auto found = known_.find(key); found != known_.end()) return found->second.form;
    auto made = std::make_shared<KnownCall>(hooks.form(record), hooks.caller);
    // Records with longer contexts have objects of their own.
    if (nb::len(attribute<"parameters">(context)) > kShortContext) return made;
    if (known_.size() >= kFormsKept) known_.clear();
    known_.insert_or_assign(key, Kept{signature, context, made});
    return made;
  }

  // `form`: of the call; null for one that was not begun.
  void answer(const Hooks& hooks, std::uint32_t number, nb::object outcome, std::uint32_t flags,
              const KnownCall* form) {
    if (mute_) return;
    RecordParts parts;
    parts.ticket = number;
    parts.word = flags;
    const bool last = (flags & kResponseOpen) == 0;
    const bool responds = is_infer_response(outcome);
    nb::object text = nb::none();
    if (responds ? infer_response(outcome).has(InferResponse::kParameters) : !outcome.is_none()) {
      text = hooks.long_text(outcome);
    }
    // Nothing stands before a record with a long text in its message.
    if (!text.is_none()) flush();
    if (responds) {
      try {
        write_response(hooks, parts, outcome, form == nullptr ? nb::none() : form->reshape);
        outcome.reset();
      } catch (nb::python_error& error) {
        if (!error.matches(bridge_error())) throw;
        outcome = nb::borrow(error.value());
        text = nb::none();
      }
    }
    if (outcome.is_valid()) {
      parts.word |= outcome.is_none() ? kResponseEmpty : kResponseError;
      const std::string context =
          outcome.is_none() ? std::string() : encoded_error(outcome, !text.is_none());
      parts.context = context;
      parts.signature = signature(hooks, nb::none());
      append(hooks, parts, nb::tuple(), 0, false);
    }
    if (!text.is_none()) {
      answered_ = 0;
      const std::string record = std::exchange(answers_, {});
      hooks.send_long(bytes_object(record), text[0], text[1]);
    } else if (calls_.empty() && last) {
      // Nothing else that it waits for may come in this turn.
      flush();
    } else if (answered_ == 1) {
      hooks.call_soon(nb::find(this).attr("flush"));
    }
    if (BusyPoll* poll = requests_.busy_poll(); poll != nullptr && last) poll->resumed();
  }

  // Lends the outputs to the caller, and writes their record.
  void write_response(const Hooks& hooks, RecordParts parts, nb::handle object,
                      const nb::object& reshape) {
    const InferResponse& response = infer_response(object);
    nb::object outputs = nb::borrow(response.get(InferResponse::kSignature));
    nb::object shapes = nb::borrow(response.get(InferResponse::kShapes));
    if (!reshape.is_none()) {
      const nb::object seen = reshape(object);
      outputs = seen[0];
      shapes = seen[1];
    }
    const nb::handle memory = response.get(InferResponse::kMemory);
    const auto* refs = TensorRefs::of(response.get(InferResponse::kRefs));
    nb::object ranges;
    nb::object context;
    bool read_only = false;
    if (refs != nullptr && !memory.is_none() && !response.has(InferResponse::kEvent) &&
        !response.has(InferResponse::kParameters) &&
        attribute<"device">(hooks.connection).is_none()) {
      StubRanges places(memory);
      std::vector<RangeItem> items;
      items.reserve(refs->size());
      for (const TensorRef& ref : *refs) {
        items.push_back(places.of(ref, response.get(InferResponse::kBuffers)));
      }
      ranges = MemoryRanges::make(std::move(items));
    } else {
      const nb::object described = hooks.describe(object);
      ranges = described[0];
      read_only = nb::cast<bool>(nb::object(described[1]));
      context = described[2];
      parts.context = view_of_bytes(context);
    }
    const std::string dims = encoded_dims(shapes);
    parts.signature = signature(hooks, outputs);
    parts.dims = dims;
    nb::object ticket = requests_.lend(ranges);
    // It says why there is none.
    if (ticket.is_none()) ticket = attribute<"lend">(hooks.connection)(ranges);
    read_only = read_only || for_others(ranges, hooks.model);
    append(hooks, parts, ranges, nb::cast<std::uint32_t>(ticket), read_only);
  }

  void append(const Hooks& hooks, RecordParts parts, nb::handle ranges, std::uint32_t lease,
              bool read_only) {
    parts.tensors = static_cast<std::uint32_t>(nb::len(ranges));
    std::string record;
    hooks.names.write(parts.append_to(record), ranges, lease, read_only);
    answers_ += record;
    ++answered_;
  }

  std::string_view signature(const Hooks& hooks, nb::handle signature) {
    auto found = signatures_.find(signature.ptr());
    if (found == signatures_.end()) {
      nb::object encoded = hooks.signature(signature);
      if (signatures_.size() >= kSignaturesKept) signatures_.clear();
      std::pair held(nb::borrow(signature), std::move(encoded));
      found = signatures_.emplace(signature.ptr(), std::move(held)).first;
    }
    return view_of_bytes(found->second.second);
  }

  nb::object requests_object_;
  at_stub::RequestsAtStub& requests_;
  nb::object reader_object_;
  RecordReader& reader_;
  // Code that calls Python holds a reference: Python may close this.
  std::shared_ptr<const Hooks> hooks_;
  int descriptor_;
  bool mute_ = false;
  bool blocked_ = false;
  std::map<std::uint32_t, nb::object> calls_;
  std::unordered_map<Key, Kept, KeyHash> known_;
  // Encoded signatures of answers, which readers have one object of.
  std::unordered_map<PyObject*, std::pair<nb::object, nb::object>> signatures_;
  std::string answers_;
  std::uint32_t answered_ = 0;
};

void Call::respond(nb::object outcome) {
  if (channel != nullptr) channel->respond(*this, std::move(outcome));
}

void Call::answer(nb::handle outcome) {
  if (channel != nullptr) channel->end(number, nb::borrow(outcome));
}

void bind_call_channel(nb::module_& module) {
  nb::class_<Call>(module, "Call", nb::type_slots(called<Call>()))
      .def("respond", &Call::respond, nb::arg().none())
      .def_ro("number", &Call::number)
      .def_ro("batch", &Call::batch)
      .def_rw("blocks", &Call::blocks)
      .def_ro("request", &Call::request)
      .def_prop_ro("form", [](const Call& call) { return call.form->given; });
  nb::class_<CallChannel>(module, "CallChannel")
      .def(nb::init<nb::object, nb::object, nb::handle, int>())
      .def("receive", &CallChannel::receive)
      .def("take", &CallChannel::take)
      .def("flush", &CallChannel::flush)
      .def("end", &CallChannel::end, nb::arg(), nb::arg().none())
      .def("forget", &CallChannel::forget)
      .def("block", &CallChannel::block)
      .def("mute", &CallChannel::mute)
      .def("call", &CallChannel::call)
      .def("calls", &CallChannel::calls)
      .def_prop_ro("kept", &CallChannel::kept)
      .def_prop_rw(
          "charged", [](const CallChannel& self) { return self.charge.charged; },
          [](CallChannel& self, std::uint64_t nbytes) { self.charge.charged = nbytes; })
      .def("close", &CallChannel::close);
}

}  // namespace gpubridge
