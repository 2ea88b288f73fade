// The stub's loop: receives messages, executes their batches, sends the results.

#include <poll.h>

#include <cerrno>

#include "buffer_view.h"
#include "clock.h"
#include "heap_type.h"
#include "ipc/control_cells.h"
#include "ipc/datagrams.h"
#include "ipc/messages.h"
#include "ipc/records.h"
#include "ipc/wait_predictor.h"
#include "list_items.h"
#include "python_object.h"
#include "stub/in_model.h"
#include "stub/output_pool.h"
#include "stub/request_reader.h"
#include "stub/response_writer.h"
#include "stub/result_sender.h"

namespace gpubridge::stub {
namespace {

// As gpubridge/transport/messages.py describes them.
constexpr char kExecute = 2;
constexpr std::size_t kResultHead = 48;
constexpr char kResponses = 21;
constexpr std::size_t kResponsesHead = 16;
constexpr std::size_t kFrameLimit = 128 * 1024;

// Python objects that the loop needs.
struct LoopParts {
  nb::object channel;   // Channel
  nb::object executor;  // Executor: runs what is not plain, and knows the model
  nb::object pool;      // OutputPool
  nb::object outputs;   // its OutputMemory
  nb::object control;   // ControlPage
  nb::object waits;     // the compiled WaitPredictor
  nb::object reader;    // RecordReader
  nb::object decode;    // decode_execute, which words what is wrong with a message
  nb::object batch;     // the class Batch
};

// Cells of the control page; an exported one stays where it is.
struct ControlViews {
  explicit ControlViews(const nb::object& page)
      : progress(page.attr("progress"), PyBUF_WRITABLE),
        claimed(page.attr("claimed"), PyBUF_WRITABLE),
        lent(page.attr("lent"), PyBUF_WRITABLE),
        cancelled(page.attr("cancelled"), PyBUF_SIMPLE),
        gathered_word(page.attr("gathered_word"), PyBUF_WRITABLE),
        gathered(page.attr("gathered"), PyBUF_WRITABLE) {}

  BufferView progress;
  BufferView claimed;
  BufferView lent;
  BufferView cancelled;
  BufferView gathered_word;
  BufferView gathered;
};

// Executes the batches of EXECUTE messages. A batch is plain where its requests are in the server's
// memory, and others look at their inputs at most if the model does not write to these: then Python
// does nothing but the model's own work, unless a response is other than tensors in host memory.
// Other batches are run by the Executor, and other messages are returned. Responses that models
// send by themselves are written here, too.
class StubLoop {
 public:
  StubLoop(LoopParts parts, RequestReader reader, ResponseWriter writer, nb::type_object response,
           LeaseBook& book, std::int64_t awake_ns, const StubLimits& limits)
      : parts_(std::move(parts)),
        book_(book),
        reader_(std::move(reader)),
        writer_(std::move(writer)),
        limits_(limits),
        sender_(nb::cast<int>(parts_.channel.attr("fileno")()), limits),
        response_(std::move(response)),
        model_(parts_.executor.attr("model")),
        enter_batch_(parts_.executor.attr("enter_batch")),
        shared_inputs_(parts_.executor.attr("shared_inputs")),
        scratch_(checked(PyByteArray_FromStringAndSize(nullptr, kFrameLimit))),
        awake_ns_(awake_ns),
        descriptor_(nb::cast<int>(parts_.channel.attr("fileno")())),
        signals_(parts_.executor.attr("signals")),
        held_(signals_.attr("held")),
        plain_(nb::cast<bool>(parts_.executor.attr("plain"))),
        decoupled_(nb::cast<bool>(parts_.executor.attr("identity").attr("decoupled"))) {
    attach();
  }

  // Receives messages until one comes that holds no batches; returns it and its descriptors. Once
  // the GPU is used, returns no bytes after each message, so that memory there is given back, and
  // when the descriptor of `wake_by` is readable, since threads of the model may use the GPU first.
  nb::object next_message() {
    for (bool ran = false;; ran = true) {
      if (soon_) waits_.poll(descriptor_, wait_ns_);
      if (ran && (uses_device_ || !wait_for_message())) {
        soon_ = false;
        return nb::make_tuple(nb::bytes(""), nb::list());
      }
      nb::object got = receive();
      nb::object message = got[0];
      const std::string_view bytes = view_of_bytes(message);
      if (bytes.empty() || bytes.front() != kExecute || nb::len(nb::object(got[1])) != 0 ||
          got[2].is(nb::bool_(true))) {
        got = parts_.channel.attr("whole")(*nb::borrow<nb::tuple>(got));
        message = got[0];
        if (view_of_bytes(message).front() != kExecute) return got;
      }
      run(message);
    }
  }

  void wake_by(int descriptor) { wake_descriptor_ = descriptor; }

  // Has the Executor run all batches from now on; threads other than the loop's may call it.
  void use_device() { uses_device_ = true; }

  // Sends a response of a request that is open; any thread may. False where it is none that is
  // written here. `wanted` holds the names of the outputs that are sent.
  bool respond(std::uint32_t ticket, nb::handle response, bool last, nb::handle wanted,
               const std::string& consumer) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(response.ptr())) != response_.ptr()) return false;
    std::string message(kResponsesHead, '\0');
    std::uint64_t copied = 0;
    try {
      const ResponseTarget target{ticket, last ? 0 : kResponseOpen, wanted, consumer};
      nb::object sent = nb::borrow(response);
      if (!writer_.write(target, sent, message, copied)) return false;
    } catch (nb::python_error&) {
      // The same happens to Python, which words it.
      return false;
    }
    message.front() = kResponses;
    put_number(put_number(message.data() + 4, std::uint32_t{1}), copied);
    send(message);
    return true;
  }

  // Sends results that wait for a slow batch; returns when the channel is closed.
  void watch() {
    const nb::gil_scoped_release unlocked;
    sender_.watch();
  }
  // Leaves what is shared with the server alone: for a forked child.
  void disown() {
    descriptor_ = -1;
    attach();
    sender_.disown();
  }

 private:
  // A batch as it lies in its message.
  struct BatchView : ExecuteBatch {
    bool plain = true;
    bool shared = false;  // whether others look at the inputs of plain requests, too
    bool called = false;  // whether other models take the outputs
  };
  // A request that is being executed.
  struct Live {
    const RecordView* record;
    nb::object wanted;             // of RecordForm
    nb::object arrival;            // its Arrival
    OwnInputs inputs;              // outputs may stay there
    std::string_view outputs_for;  // of its context, in its message
  };

  void attach() {
    control_.emplace(parts_.control);
    store_cell(*static_cast<std::uint64_t*>(control_->claimed.data()), kClaims);
    sender_.gather_in({static_cast<std::uint64_t*>(control_->gathered_word.data()),
                       {static_cast<char*>(control_->gathered.data()), control_->gathered.size()}});
  }

  // Receives a message as `receive_message` does, but that signals wait for the model's code.
  nb::object receive() {
    const BufferView buffer(scratch_, PyBUF_WRITABLE);
    const std::span memory(static_cast<char*>(buffer.data()), buffer.size());
    Datagram received = receive_unlocked(descriptor_, memory);
    while (received.count < 0 && errno == EINTR) received = receive_unlocked(descriptor_, memory);
    return message_of(received, memory);
  }

  void run(nb::handle message) {
    waits_.end(monotonic_ns());
    waits_.alone = view_of_bytes(message)[1] != 0;
    const std::vector<BatchView> batches = this->batches(message);
    bool called = false;
    for (std::size_t index = 0; index < batches.size(); ++index) {
      const bool last = index + 1 == batches.size();
      const BatchView& batch = batches[index];
      called = called || batch.called;
      if (!claim(*static_cast<std::uint64_t*>(control_->claimed.data()), batch.sequence)) {
        skip(batch, last);
      } else if (batch.plain && !uses_device_ && !is_crowded() &&
                 (!batch.shared || shows_shared())) {
        run_plain(message, batch, last);
      } else {
        run_in_python(message, batch, last);
      }
      // The others have not started: another stub gets them.
      if (has_lost_device()) return;
    }
    reclaims_ = pool_.take_lent_once() || reclaims_;
    soon_ = false;
    // Only now: the server waits for what was sent.
    if (reclaims_) reclaims_ = nb::cast<bool>(parts_.outputs.attr("reclaim")());
    soon_ = waits_.begin(monotonic_ns());
    wait_ns_ = called ? 2 * awake_ns_ : awake_ns_;
  }

  std::vector<BatchView> batches(nb::handle message) {
    try {
      std::vector<BatchView> batches;
      for (ExecuteBatch& each : decode_execute(view_of_bytes(message))) {
        BatchView& batch = batches.emplace_back(BatchView{std::move(each), plain_});
        for (const RecordView& record : batch.records) {
          reader_.form(record);
          const Context context = RequestReader::context(record);
          batch.plain = batch.plain && reader_.is_plain(record, context) &&
                        record.ticket() < control_->lent.size();
          batch.shared = batch.shared || context.has(ContextField::kShared);
          batch.called = batch.called || context.has(ContextField::kOutputsFor);
        }
      }
      return batches;
    } catch (const std::invalid_argument&) {
      // Of a record or a context: Python words it.
      parts_.decode(message, parts_.reader);
      throw;
    }
  }

  // The server has withdrawn the batch: others execute it.
  void skip(const BatchView& batch, bool last) {
    result_.assign(kResultHead, '\0');
    copied_ = 0;
    started_ = called_ = ended_ = monotonic_ns();
    for (const RecordView& record : batch.records) answer_nothing(record.ticket(), result_);
    finish(batch);
    send_result(result_, started_, ended_, last);
  }

  void run_in_python(nb::handle message, const BatchView& batch, bool last) {
    const nb::object read =
        parts_.reader.attr("read")(message, batch.first, batch.records.size(), true);
    const nb::object result =
        parts_.executor.attr("run")(parts_.batch(batch.sequence, nb::object(read[0])));
    const auto* words = static_cast<const std::uint64_t*>(control_->progress.data());
    const auto started = static_cast<std::int64_t>(words[1]);
    reclaims_ = true;
    send_result(view_of_bytes(result), started,
                nb::cast<std::int64_t>(parts_.executor.attr("ended_at")), last);
  }

  void run_plain(nb::handle message, const BatchView& batch, bool last) {
    std::vector<Live> live;
    std::string skipped;
    result_.assign(kResultHead, '\0');
    copied_ = 0;
    started_ = called_ = start(batch.sequence);
    std::vector<nb::object> responses;
    bool again = false;
    try {
      take_live(message, batch, live, skipped);
      nb::object requests = take_requests(live);
      enter_batch_(batch.sequence);
      called_ = monotonic_ns();
      if (!live.empty()) responses = execute(std::move(requests), live);
      again = batch.shared && has_error(responses) && runs_again(list_of(responses), live);
    } catch (nb::python_error& error) {
      again = batch.shared && runs_again(nb::borrow(error.value()), live);
      if (!again)
        responses = items_of(parts_.executor.attr("errors_of")(error.value(), origins(live)));
    }
    if (again) {
      responses.clear();
      run_in_python(message, batch, last);
      return;
    }
    ended_ = monotonic_ns();
    for (std::size_t index = 0; index < live.size(); ++index) {
      answer(live[index], std::move(responses[index]));
    }
    result_ += skipped;
    finish(batch);
    responses.clear();
    send_result(result_, started_, ended_, last);
  }

  // Takes the requests of a batch that are not cancelled, and makes the answers of the others: each
  // has an answer, whatever happens from then on.
  void take_live(nb::handle message, const BatchView& batch, std::vector<Live>& live,
                 std::string& skipped) {
    std::size_t at = batch.first;
    live.reserve(batch.records.size());
    for (const RecordView& record : batch.records) {
      const std::size_t begin = std::exchange(at, at + record.size());
      if (is_cancelled(record.ticket())) {
        answer_nothing(record.ticket(), skipped);
        continue;
      }
      const Context context = RequestReader::context(record);
      live.push_back({&record, reader_.form(record).wanted, reader_.arrival(message, begin),
                      OwnInputs(record, context, book_, limits_.passed_on_bytes),
                      context.text(ContextField::kOutputsFor)});
    }
  }

  nb::object take_requests(std::span<const Live> live) {
    nb::object requests = checked(PyList_New(0));
    for (const Live& each : live) {
      const nb::object request =
          reader_.request(*each.record, reader_.form(*each.record), each.arrival);
      if (PyList_Append(requests.ptr(), request.ptr()) != 0) throw nb::python_error();
    }
    return requests;
  }

  // Calls the model; returns the answer of each request, None where there is none now. The list
  // that the model returned stays the model's: nothing is taken out of it, and it may change.
  std::vector<nb::object> execute(nb::object requests, std::span<const Live> live) {
    const nb::object returned = call_model(requests);
    // They hold their memory.
    requests.reset();
    if (decoupled_ && returned.is_none()) return std::vector<nb::object>(live.size(), nb::none());
    if (!decoupled_ && PyList_CheckExact(returned.ptr()) != 0) {
      std::vector<nb::object> responses = items_of(returned);
      if (is_usual(responses, live)) {
        // The tickets will be other requests': who asks for a sender from now on gets a closed one.
        for (const Live& each : live) {
          arrival_of(each.arrival).end(is_cancelled(each.record->ticket()));
        }
        return responses;
      }
    }
    return items_of(parts_.executor.attr("checked_responses")(returned, origins(live)));
  }

  nb::object call_model(nb::handle requests) {
    const InModel in_model(signals_);
    if (PyDict_Size(held_.ptr()) != 0) signals_.attr("run_held")();
    return checked(PyObject_CallMethodObjArgs(model_.ptr(), name_object<"execute">(),
                                              requests.ptr(), nullptr));
  }

  // True if there is one response for each request, and nothing else was asked of the requests.
  bool is_usual(std::span<const nb::object> responses, std::span<const Live> live) const {
    bool usual = responses.size() == live.size();
    for (std::size_t index = 0; usual && index < live.size(); ++index) {
      usual = responses[index].type().is(response_) &&
              !arrival_of(live[index].arrival).origin.is_valid();
    }
    return usual;
  }

  // True if any response is an error.
  bool has_error(std::span<const nb::object> responses) const {
    return std::ranges::any_of(responses, [&](const nb::object& each) {
      return each.type().is(response_) && as<Response>(each.ptr())->fields[kError] != Py_None;
    });
  }

  // True if a batch has to be run again with copies of its shared inputs, by its exception or its
  // responses.
  bool runs_again(const nb::object& outcome, std::span<const Live> live) const {
    return nb::cast<bool>(parts_.executor.attr("runs_again")(outcome, origins(live)));
  }

  static nb::list origins(std::span<const Live> live) {
    nb::list origins;
    for (const Live& each : live) origins.append(arrival_of(each.arrival).ask());
    return origins;
  }

  // Appends the answer of a cancelled request, whose memory was not used.
  void answer_nothing(std::uint32_t ticket, std::string& result) {
    if (ticket < control_->lent.size()) {
      store_cell<std::uint8_t>(static_cast<std::uint8_t*>(control_->lent.data())[ticket], 0);
    }
    writer_.write_nothing(ticket, kResponseCancelled, result);
  }

  // Appends the answer of a request to the result.
  void answer(const Live& live, nb::object response) {
    if (answer_here(live, response)) return;
    const nb::object origin = arrival_of(live.arrival).ask();
    nb::list only;
    only.append(std::move(response));
    nb::object record;
    try {
      record = parts_.executor.attr("encode_response")(origin, only, 0);
    } catch (nb::python_error& error) {
      record = parts_.executor.attr("encode_failure")(origin, error.value());
    }
    result_ += view_of_bytes(record);
    copied_ += nb::cast<std::uint64_t>(parts_.executor.attr("take_copied")());
    reclaims_ = true;
  }

  [[nodiscard]] bool answer_here(const Live& live, nb::object& response) {
    Arrival& arrival = arrival_of(live.arrival);
    const std::uint32_t ticket = live.record->ticket();
    if (decoupled_ && response.is_none()) {
      // With its origin the request ends, if the model has dropped it.
      arrival.ask();
      writer_.write_nothing(ticket, kResponseOpen | kResponseEmpty, result_);
      return true;
    }
    if (!response.type().is(response_)) return false;
    const std::size_t before = result_.size();
    try {
      const auto* const lent = static_cast<const unsigned char*>(control_->lent.data()) + ticket;
      const ResponseTarget target{ticket, 0, live.wanted, live.outputs_for, &live.inputs, lent};
      if (!writer_.write(target, response, result_, copied_)) return false;
    } catch (nb::python_error& error) {
      // The same happens to Python, which words it; where the response is gone, it is this.
      result_.resize(before);
      if (response.is_valid()) return false;
      const nb::object failure =
          parts_.executor.attr("encode_failure")(arrival.ask(), error.value());
      result_ += view_of_bytes(failure);
    }
    return true;
  }

  void finish(const BatchView& batch) {
    char* at = result_.data();
    at = put_number(at, batch.sequence);
    for (const std::int64_t time : {started_, called_, ended_}) at = put_number(at, time);
    at = put_number(at, copied_ + pool_.take_copied());
    put_number(at, static_cast<std::uint32_t>(batch.records.size()));
  }

  void send_result(std::string_view result, std::int64_t started, std::int64_t ended, bool last) {
    sender_.note_time(started, ended);
    // Without a thread that would send it during a slow batch, none is kept.
    const bool now = last || has_lost_device() || (sender_.wants_watch() && !is_watched());
    const std::string_view frame = sender_.add(result, started, ended, now);
    if (frame.empty()) return;
    send(frame);
    sender_.sent();
  }

  // Starts the thread that watches; false while the system has none.
  bool is_watched() {
    if (watches_) return true;
    const nb::object watch = nb::find(this).attr("watch");
    return watches_ = nb::cast<bool>(parts_.executor.attr("start_thread")(watch));
  }

  void send(std::string_view message) {
    if (message.size() > kFrameLimit) {
      parts_.channel.attr("send")(bytes_object(message));
      return;
    }
    int failed = 0;
    {
      const nb::gil_scoped_release unlocked;
      failed = sender_.send(message);
    }
    if (failed != 0) {
      errno = failed;
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
  }

  std::int64_t start(std::uint64_t sequence) {
    auto* words = static_cast<std::uint64_t*>(control_->progress.data());
    const std::int64_t time = monotonic_ns();
    // The time first: who sees the new number must not see the old time.
    __atomic_store_n(words + 1, static_cast<std::uint64_t>(time), __ATOMIC_RELAXED);
    __atomic_store_n(words, sequence, __ATOMIC_RELEASE);
    return time;
  }

  // Returns whether there is a message, or no descriptor that wakes the loop: then to receive
  // waits.
  [[nodiscard]] bool wait_for_message() const {
    if (wake_descriptor_ < 0 || descriptor_ < 0) return true;
    std::array<pollfd, 2> looked{{{descriptor_, POLLIN, 0}, {wake_descriptor_, POLLIN, 0}}};
    const nb::gil_scoped_release unlocked;
    return poll(looked.data(), looked.size(), -1) > 0 && looked[0].revents != 0;
  }

  [[nodiscard]] bool is_cancelled(std::uint32_t ticket) const {
    const auto* flags = static_cast<const unsigned char*>(control_->cancelled.data());
    return __atomic_load_n(flags + ticket, __ATOMIC_ACQUIRE) != 0;
  }
  [[nodiscard]] bool is_crowded() const {
    return book_.held() > limits_.kept_leases || book_.held_bytes() > limits_.kept_bytes;
  }
  [[nodiscard]] bool shows_shared() const {
    return nb::cast<bool>(shared_inputs_.attr("read_only"));
  }
  [[nodiscard]] bool has_lost_device() const {
    return uses_device_ && nb::cast<bool>(parts_.executor.attr("has_lost_device"));
  }

  LoopParts parts_;
  WaitPredictor& waits_ = nb::cast<WaitPredictor&>(parts_.waits);
  LeaseBook& book_;
  OutputPool& pool_ = nb::cast<OutputPool&>(parts_.pool);
  RequestReader reader_;
  ResponseWriter writer_;
  StubLimits limits_;
  ResultSender sender_;
  nb::type_object response_;
  nb::object model_;
  nb::object enter_batch_;
  nb::object shared_inputs_;
  nb::object scratch_;
  std::int64_t awake_ns_;
  std::int64_t wait_ns_ = 0;  // for how long to stay awake now
  int descriptor_;
  int wake_descriptor_ = -1;
  nb::object signals_;  // SignalHandlers
  nb::object held_;     // of it: handlers that wait for the model's code
  bool plain_;          // whether batches of this model may be plain
  bool decoupled_;      // whether the model sends all responses by itself
  // Whether anything of this process may be on the GPU.
  bool uses_device_ = false;
  bool soon_ = false;      // whether the next message is likely to come soon
  bool watches_ = false;   // whether there is a thread that watches
  bool reclaims_ = false;  // whether the OutputMemory may have lent slots by itself
  std::optional<ControlViews> control_;

  // Of the batch at hand.
  std::string result_;
  std::uint64_t copied_ = 0;
  std::int64_t started_ = 0;
  std::int64_t called_ = 0;
  std::int64_t ended_ = 0;
};

StubLimits limits_of(nb::handle given) {
  StubLimits limits;
  const auto take = [&](const char* name, auto& limit) {
    limit = nb::cast<std::remove_reference_t<decltype(limit)>>(given.attr(name));
  };
  take("gathered_ns", limits.gathered_ns);
  take("long_ns", limits.long_ns);
  take("watched_batches", limits.watched_batches);
  take("patience_ns", limits.patience_ns);
  take("quiet_looks", limits.quiet_looks);
  take("kept_leases", limits.kept_leases);
  take("kept_bytes", limits.kept_bytes);
  take("passed_on_bytes", limits.passed_on_bytes);
  return limits;
}

// Of `classes`: Tensor, InferenceRequest, InferenceResponse, and what makes an InferenceTrace of a
// number. Of `transport`: the RecordReader,
// parse_signature, the OutputCheck, decode_execute and Batch.
void make_loop(StubLoop* place, nb::object channel, nb::object executor, nb::object pool,
               nb::object control, nb::object waits, LeaseBook& book, const nb::tuple& classes,
               const nb::tuple& transport, std::int64_t awake_ns, nb::handle limits) {
  const auto tensor = nb::borrow<nb::type_object>(classes[0]);
  use_tensor_class(tensor);
  const nb::object identity = executor.attr("identity");
  auto& outputs = nb::cast<OutputPool&>(pool);
  RequestReader reader(
      TensorReader(transport[1], identity.attr("outputs"), tensor, book),
      {executor.attr("handle_of"), executor.attr("control_tensors"), nb::object(classes[3])},
      {identity.attr("name"), identity.attr("version")}, nb::borrow<nb::type_object>(classes[1]));
  ResponseWriter writer(transport[2], tensor, outputs);
  LoopParts parts{
      std::move(channel), std::move(executor), std::move(pool), nb::borrow(outputs.memory()),
      std::move(control), std::move(waits),    transport[0],    transport[3],
      transport[4]};
  new (place) StubLoop(std::move(parts), std::move(reader), std::move(writer),
                       nb::borrow<nb::type_object>(classes[2]), book, awake_ns, limits_of(limits));
}

}  // namespace

}  // namespace gpubridge::stub

namespace gpubridge {

void bind_stub_loop(nb::module_& module) {
  using stub::StubLoop;
  nb::class_<StubLoop>(module, "StubLoop")
      .def("__init__", &stub::make_loop, nb::keep_alive<1, 7>())
      .def("next_message", &StubLoop::next_message)
      .def("wake_by", &StubLoop::wake_by)
      .def("use_device", &StubLoop::use_device)
      .def("respond", &StubLoop::respond)
      .def("watch", &StubLoop::watch)
      .def("disown", &StubLoop::disown);
}

}  // namespace gpubridge
