// A gRPC connection between its socket and its calls. Plain unary inference requests go to their
// models, large ones into the memory of those as they come, and their answers to the socket,
// without Python code: those that have a template, no time-out and no compression. All other events
// are for Python.

#include "clock.h"
#include "heap_type.h"
#include "ipc/infer_request_binding.h"
#include "net/access_log_binding.h"
#include "net/http2_binding.h"
#include "net/idle_connections.h"
#include "python_object.h"
#include "request/message_receiver.h"
#include "request/responses_binding.h"
#include "request/templates_binding.h"
#include "request/trace_sampling.h"

namespace gpubridge::http2 {
namespace {

// Below this no read was one of a large body into its place; after so many others have their turn.
constexpr std::size_t kLargeRead = std::size_t{1} << 12U;
constexpr int kVectoredReads = 4;

}  // namespace

// State that all calls of ModelInfer share; the base of the class InferEndpoint of
// gpubridge/frontend/grpc/infer.py.
struct GrpcInferEndpoint {
  // True if what begins, or is there as a whole, is a plain call that is not traced.
  [[nodiscard]] bool takes(const Event& event) const {
    return (event.kind == EventKind::kCall || event.kind == EventKind::kBegin) &&
           event.headers->method() == method && event.headers->plain() &&
           event.headers->admitted() && !event.compressed &&
           !sampling.takes([&] { return event.headers->traceparent(); });
  }

  int traverse(visitproc visit, void* arg) const {
    return visit_all({&templates_object, &sampling_object}, visit, arg);
  }
  // Nothing: others refer to what these hold until they are gone, and clear what leads back here.
  void clear() {}

  int method;
  nb::object templates_object;
  nb::object sampling_object;
  std::shared_ptr<HeaderFields> headers;
  std::shared_ptr<HeaderFields> trailers;
  PythonTemplates& templates = nb::cast<PythonTemplates&>(templates_object);
  TraceSampling& sampling = nb::cast<TraceSampling&>(sampling_object);
};

// Moves bytes between a transport and an Http2Connection. It holds its owner until it is lost.
class GrpcConnection {
 public:
  // The owner has `take(events)`, `flushed(outcome)`, `hand_over(...)`, an `account`, and
  // `charge(nbytes)`, which returns what it has charged for what is kept here; `calls`
  // are those by stream, to which the plane adds its own. Without an endpoint all calls are
  // Python's.
  GrpcConnection(nb::object http2, nb::object owner, nb::object calls, nb::object endpoint,
                 nb::object idle)
      : http2_object_(std::move(http2)),
        http2_(nb::cast<PythonConnection&>(http2_object_)),
        take_(owner.attr("take")),
        flushed_(owner.attr("flushed")),
        hand_over_(owner.attr("hand_over")),
        charge_(owner.attr("charge")),
        account_(owner.attr("account")),
        calls_(std::move(calls)),
        endpoint_object_(std::move(endpoint)),
        owner_(owner),
        idle_(std::move(idle)) {
    if (!endpoint_object_.is_none()) endpoint_ = nb::cast<GrpcInferEndpoint*>(endpoint_object_);
  }

  // `soon` has a callable called in the next turn of the event loop.
  void start(nb::object transport, int descriptor, nb::object soon) {
    transport_ = std::move(transport);
    descriptor_ = descriptor;
    soon_ = std::move(soon);
  }

  nb::object get_buffer(nb::handle /*size_hint*/) { return http2_.memory(); }
  void buffer_updated(std::size_t nbytes) {
    const double now = monotonic_seconds();
    idle_.leave();
    core().received(nbytes, now);
    take();
    // The remaining frames of a large body are received with few reads.
    const int reads = descriptor_ >= 0 && nbytes >= kLargeRead ? kVectoredReads : 0;
    for (int read = 0; read < reads && !stopped(); ++read) {
      http2_.receive_more(descriptor_, now);
      if (!take()) break;
    }
    flush();
  }

  // The client sends no more: requests that have not ended do so now.
  void end_input() {
    core().end_input();
    take();
  }
  // Sends as much as the socket takes; its transport keeps the rest.
  void flush() {
    flush_due_ = false;
    // Most often what came was a request, whose answer follows later.
    const bool quiet = !core().output().waits() && !core().has_events() && !core().closed();
    if (!(quiet && !hung_up) && !stopped()) send();
    charge_kept();
    look_idle();
  }

  // Has it called once for all that is left to be sent in a turn of the event loop.
  void flush_soon() {
    if (flush_due_ || soon_.is_none()) return;
    flush_due_ = true;
    soon_(attribute<"flush">(nb::find(*this)));
  }

  void lose() {
    core().lost();
    idle_.leave();
    drop_all({&take_, &flushed_, &hand_over_, &charge_, &transport_, &soon_});
  }

  int traverse(visitproc visit, void* arg) const {
    idle_.traverse(visit, arg);
    return visit_all({&http2_object_, &take_, &flushed_, &hand_over_, &charge_, &account_, &calls_,
                      &endpoint_object_, &transport_, &soon_},
                     visit, arg);
  }
  // What leads to its owner; the others are used until it is gone.
  void clear() { lose(); }

  // Of the plane's calls.
  [[nodiscard]] nb::object endpoint() const { return endpoint_object_; }
  [[nodiscard]] Connection& core() { return http2_; }
  [[nodiscard]] const nb::object& account() const { return account_; }
  // True if there is no memory for further calls and requests.
  [[nodiscard]] bool full() { return charge.refuses(core().kept()); }
  // True if control calls keep so much that there may be none for further ones, either. They have
  // bytes of their own, as one may free what the open requests wait for.
  [[nodiscard]] bool full_of_control() { return core().kept_by_control() > KeptCharge::kUncharged; }
  void forget(std::uint32_t stream) {
    const nb::int_ key(stream);
    if (PyDict_Contains(calls_.ptr(), key.ptr()) == 1) PyDict_DelItem(calls_.ptr(), key.ptr());
  }
  // Gives a call to Python, with what has come of a large message: a MessageReceiver, or None;
  // with `end` no more comes. Returns the call there, None if it has ended.
  nb::object hand_over(std::uint32_t stream, const std::shared_ptr<const RequestHeaders>& headers,
                       const nb::object& receiver, bool end) {
    const nb::object hand_over = hand_over_;
    return hand_over(stream, headers->method(), headers_object(headers), receiver, end);
  }

  // Returns the header fields of a call that fails.
  nb::object failure(std::uint32_t stream, nb::handle error) {
    const AccessRecord* record = core().access(stream);
    return attribute<"failure">(owner_)(error, record == nullptr ? 0 : record->number);
  }

  bool paused = false;
  // The client sends no more: what is held back is looked at with each flush.
  bool hung_up = false;
  KeptCharge charge;

 private:
  // A socket that has failed: the owner hears that it is lost, and drops all.
  [[nodiscard]] bool stopped() const {
    return paused || transport_.is_none() || nb::cast<bool>(attribute<"is_closing">(transport_)());
  }

  // A connection without open calls that may stay is idle since it last sent or received.
  void look_idle() {
    if (core().open_streams() == 0 && PyDict_Size(calls_.ptr()) == 0 && !core().closed() &&
        !transport_.is_none()) {
      idle_.enter(owner_);
    } else {
      idle_.leave();
    }
  }

  // Has the owner charge what the peer has us keep.
  void charge_kept() {
    const auto due = charge.due(core().kept());
    if (const nb::object call = charge_; due && !call.is_none()) {
      charge.settle(*due, nb::cast<std::uint64_t>(call(*due)));
    }
  }

  void send() {
    const nb::object outcome = http2_.flush(descriptor_);
    if (const nb::object flushed = flushed_; !outcome.is_none() || hung_up) flushed(outcome);
  }
  // Takes what has happened; returns whether anything had.
  bool take() {
    if (!core().has_events()) return false;
    nb::list others;
    const Events events = core().take_events();
    for (const Event& event : events) {
      if (!infer(event)) others.append(http2_.told(event));
    }
    // The called function may lose the connection.
    if (const nb::object take = take_; others.size() != 0 && !take.is_none()) take(others);
    return true;
  }

  bool infer(const Event& event);

  nb::object http2_object_;
  PythonConnection& http2_;
  nb::object take_;
  nb::object flushed_;
  nb::object hand_over_;
  nb::object charge_;
  nb::object account_;
  nb::object calls_;
  nb::object endpoint_object_;
  GrpcInferEndpoint* endpoint_ = nullptr;
  nb::handle owner_;  // alive until it is lost: the callbacks refer to it
  IdlePlace idle_;
  nb::object transport_ = nb::none();
  nb::object soon_ = nb::none();
  int descriptor_ = -1;
  bool flush_due_ = false;
};

// One plain request, with the methods of a Call that its connection uses.
class GrpcInferCall {
 public:
  GrpcInferCall(nb::object connection, const Event& event)
      : connection_object_(std::move(connection)),
        connection_(nb::cast<GrpcConnection*>(connection_object_)),
        endpoint_(connection_->endpoint()),
        stream_(event.stream),
        headers_(event.headers) {}

  // Gives the model a request of a whole message; it calls `self` with the outcome. False if it is
  // for Python.
  bool submit(const nb::object& self, const Message& message, const nb::dict& calls) {
    bool taken = true;
    attempt(
        [&] {
          const MadeRequest made = nb::cast<GrpcInferEndpoint&>(endpoint_).templates.take_message(
              text_of(message.bytes()), self);
          taken = made.known != nullptr;
          if (!taken) return;
          if (attribute<"submit">(made.known->given).is_none()) {
            // Not for unary calls, as Python will say.
            attribute<"free">(attribute<"arena">(made.known->given))(made.request.attr("slot"));
            taken = false;
            return;
          }
          calls[nb::int_(stream_)] = self;
          give(made);
        },
        [&](const nb::object& error) { refuse(error); });
    return taken;
  }

  // Takes what has come of a message; false if that is for Python, which has the call then.
  bool receive(const nb::object& self, const Event& event, const nb::dict& calls) {
    if (connection_ == nullptr) return false;
    switch (event.kind) {
      case EventKind::kMessages:
        if (!event.compressed && submit(self, event.messages.front(), calls)) return true;
        hand_over(event.end);
        return false;
      case EventKind::kLarge:
        if (event.compressed) {
          hand_over(false);
          return false;
        }
        [[fallthrough]];
      case EventKind::kData:
      case EventKind::kFilled:
        attempt([&] { take_part(self, event); }, [&](const nb::object& error) { refuse(error); });
        return true;
      default:
        return false;
    }
  }

  // Hands a message over that is still coming, or to come: Python looks how fast.
  void check(nb::handle now, nb::handle window) {
    if (connection_ == nullptr || request_.is_valid()) return;
    if (const nb::object call = hand_over(false); !call.is_none())
      attribute<"check">(call)(now, window);
  }

  // Takes the outcome, or the pieces of a frame that Python's `frame` was to give later.
  void answer(nb::handle outcome) {
    if (connection_ == nullptr) return;
    bool sent = false;
    attempt(
        [&] {
          const std::vector<nb::object> pieces = frame(outcome);
          if (pieces.empty()) return;
          const std::vector<Segment> body = segments_of(pieces);
          const auto& endpoint = nb::cast<const GrpcInferEndpoint&>(endpoint_);
          connection_->core().send_response(stream_, endpoint.headers, body, endpoint.trailers);
          sent = true;
        },
        [&](const nb::object& error) { fail(error); });
    if (sent) finish();
  }

  void refuse(nb::handle error) {
    if (connection_ == nullptr) return;
    if (request_.is_valid()) infer_request(request_).cancel();
    fail(error);
  }

  void fail(nb::handle error) {
    if (connection_ == nullptr) return;
    close_receiver();
    const nb::object fields = connection_->failure(stream_, error);
    connection_->core().send_headers(stream_, nb::cast<std::shared_ptr<HeaderFields>>(fields),
                                     true);
    finish();
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(request_.ptr());
    return visit_all({&connection_object_, &endpoint_, &receiver_}, visit, arg);
  }
  void clear() {
    connection_ = nullptr;
    request_.reset();
    drop_all({&connection_object_, &endpoint_, &receiver_});
  }

  void abort() {
    if (std::exchange(connection_, nullptr) == nullptr) return;
    close_receiver();
    if (const nb::object request = std::exchange(request_, {}); request.is_valid()) {
      infer_request(request).cancel();
    }
  }

 private:
  void take_part(const nb::object& self, const Event& event) {
    if (event.kind == EventKind::kLarge) {
      receiver_ = attribute<"receive">(endpoint_)(event.value, connection_->account(),
                                                  attribute<"refuse">(self));
      return;
    }
    if (receiver_.is_none()) return;
    const nb::object kept = receiver_;
    auto& receiver = *nb::inst_ptr<MessageReceiver>(kept);
    if (event.kind == EventKind::kFilled) {
      receiver.filled();
    } else {
      receiver.feed(text_of(event.data));
    }
    if (const std::span<std::uint8_t> target = receiver.target(); !target.empty()) {
      connection_->core().receive_into(stream_, {target.data(), target.size(), receiver.owner()});
    }
    if (receiver.complete()) {
      complete(self);
    } else if (event.end) {
      hand_over(true);
    }
  }

  // Gives the model the request of a large message that is whole.
  void complete(const nb::object& self) {
    auto& receiver = *nb::inst_ptr<MessageReceiver>(receiver_);
    const MadeRequest made = receiver.take(nb::cast<GrpcInferEndpoint&>(endpoint_).templates, self,
                                           connection_->core().copied(stream_));
    if (made.known == nullptr) {
      hand_over(true);
      return;
    }
    close_receiver();
    if (attribute<"submit">(made.known->given).is_none()) {
      attribute<"free">(attribute<"arena">(made.known->given))(made.request.attr("slot"));
      fail(attribute<"decoupled">(endpoint_)(made.known->given));
    } else {
      give(made);
    }
  }

  nb::object hand_over(bool end) {
    GrpcConnection& connection = *std::exchange(connection_, nullptr);
    return connection.hand_over(stream_, headers_, std::exchange(receiver_, nb::none()), end);
  }
  // Gives a request to its model.
  void give(const MadeRequest& made) {
    known_ = made.known;
    request_ = made.request;
    if (AccessRecord* record = connection_->core().access(stream_)) {
      note_model(*record, known_->given.attr("model").attr("statistics"));
      note_identifier(*record, request_);
    }
    if (!made.regions.is_none()) {
      attribute<"share">(endpoint_)(made.request, made.regions, known_->given);
    }
    // As over HTTP, a cache would look the request up here.
    attribute<"submit">(known_->given)(made.request, nb::none());
  }

  void close_receiver() {
    if (const nb::object receiver = std::exchange(receiver_, nb::none()); !receiver.is_none()) {
      nb::inst_ptr<MessageReceiver>(receiver)->close();
    }
  }

  void finish() {
    GrpcConnection& connection = *std::exchange(connection_, nullptr);
    connection.forget(stream_);
    connection.flush_soon();
    request_.reset();
  }

  // Returns the frame of a response, which Python encodes if it is not plain; nothing for one that
  // this is called with when a worker has encoded it.
  std::vector<nb::object> frame(nb::handle outcome) const {
    const nb::object identifier =
        nb::borrow(infer_request(request_).get(InferRequest::kIdentifier));
    if (is_infer_response(outcome)) {
      const InferResponse& response = infer_response(outcome);
      const nb::handle signature = response.get(InferResponse::kSignature);
      const nb::object known = known_->answer(signature, [&] {
        return attribute<"plain_template">(endpoint_)(known_->given, signature);
      });
      if (!known.is_none() && !response.has(InferResponse::kParameters)) {
        EncodedFrame made =
            encode_frame(nb::cast<const MessageResponseTemplate&>(known), view_of_text(identifier),
                         {}, response.get(InferResponse::kShapes),
                         response.get(InferResponse::kBuffers), false, nb::tuple());
        if (!made.pieces.empty()) return std::move(made.pieces);
      }
    }
    nb::object made = nb::borrow(outcome);
    if (!nb::isinstance<nb::list>(outcome)) {
      made = attribute<"frame">(endpoint_)(known_->given, identifier, outcome, nb::find(*this));
    }
    std::vector<nb::object> pieces;
    if (made.is_none()) return pieces;
    for (const nb::handle piece : made) pieces.push_back(nb::borrow(piece));
    return pieces;
  }

  nb::object connection_object_;
  GrpcConnection* connection_;  // null after its end
  nb::object endpoint_;
  std::uint32_t stream_;
  std::shared_ptr<const RequestHeaders> headers_;
  nb::object receiver_ = nb::none();  // of a large message that is still coming
  std::shared_ptr<KnownTemplate> known_;
  nb::object request_;
};

bool GrpcConnection::infer(const Event& event) {
  if (endpoint_ == nullptr || take_.is_none()) return false;
  const auto calls = nb::borrow<nb::dict>(calls_);
  const nb::int_ key(event.stream);
  if (endpoint_->takes(event)) {
    // Python refuses it.
    if (full()) return false;
    const nb::object call = nb::cast(GrpcInferCall(nb::find(*this), event));
    if (event.kind == EventKind::kCall) {
      return nb::inst_ptr<GrpcInferCall>(call)->submit(call, event.messages.front(), calls);
    }
    calls[key] = call;
    return true;
  }

  const nb::handle found = PyDict_GetItemWithError(calls.ptr(), key.ptr());
  if (!found.is_valid() || !nb::isinstance<GrpcInferCall>(found)) return false;
  const nb::object call = nb::borrow(found);
  return nb::inst_ptr<GrpcInferCall>(call)->receive(call, event, calls);
}

}  // namespace gpubridge::http2

namespace gpubridge {

void bind_grpc_inference(nb::module_& module) {
  using http2::GrpcConnection;
  using http2::GrpcInferCall;
  using http2::GrpcInferEndpoint;
  nb::class_<GrpcInferEndpoint>(module, "GrpcInferEndpoint",
                                nb::type_slots(collected<GrpcInferEndpoint>()))
      .def(nb::init<int, nb::object, nb::object, std::shared_ptr<HeaderFields>,
                    std::shared_ptr<HeaderFields>>());
  nb::class_<GrpcConnection>(module, "GrpcConnectionState",
                             nb::type_slots(collected<GrpcConnection>()))
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object>(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg().none(), nb::arg())
      .def("start", &GrpcConnection::start)
      .def("get_buffer", &GrpcConnection::get_buffer)
      .def("buffer_updated", &GrpcConnection::buffer_updated)
      .def("end_input", &GrpcConnection::end_input)
      .def("flush", &GrpcConnection::flush)
      .def("flush_soon", &GrpcConnection::flush_soon)
      .def("lose", &GrpcConnection::lose)
      .def_rw("paused", &GrpcConnection::paused)
      .def_rw("hung_up", &GrpcConnection::hung_up)
      .def_prop_ro("full", &GrpcConnection::full)
      .def_prop_ro("full_of_control", &GrpcConnection::full_of_control)
      .def_prop_rw(
          "charged", [](const GrpcConnection& self) { return self.charge.charged; },
          [](GrpcConnection& self, std::uint64_t nbytes) { self.charge.charged = nbytes; });
  const auto nothing = [](GrpcInferCall&, const nb::args&) {};
  nb::class_<GrpcInferCall>(module, "GrpcInferCall", nb::type_slots(called<GrpcInferCall>()))
      .def("refuse", &GrpcInferCall::refuse)
      .def("fail", &GrpcInferCall::fail)
      .def("abort", &GrpcInferCall::abort)
      .def("drain", nothing)
      .def("input_ended", nothing)
      .def("check", &GrpcInferCall::check)
      .def("writable", nothing);
}

}  // namespace gpubridge
