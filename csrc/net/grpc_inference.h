// A gRPC connection between its socket and its calls. Plain unary inference requests go to their
// models, large ones into the memory of those as they come, and their answers to the socket,
// without Python code: those that have a template, no time-out and no compression. All other events
// are for Python.
#pragma once

#include "net/http2_binding.h"
#include "net/idle_connections.h"
#include "python_object.h"
#include "request/templates_binding.h"

namespace gpubridge::http2 {

// State that all calls of ModelInfer share; the base of the class InferEndpoint of
// gpubridge/frontend/grpc/infer.py.
class GrpcInferEndpoint {
 public:
  GrpcInferEndpoint(int method, nb::object templates, nb::object traces,
                    std::shared_ptr<HeaderFields> headers, std::shared_ptr<HeaderFields> trailers);

  // True if what begins, or is there as a whole, is a plain call that is not traced.
  [[nodiscard]] bool takes(const Event& event) const;
  [[nodiscard]] PythonTemplates& templates() const { return *templates_; }
  [[nodiscard]] const std::shared_ptr<HeaderFields>& headers() const { return headers_; }
  [[nodiscard]] const std::shared_ptr<HeaderFields>& trailers() const { return trailers_; }

 private:
  int method_;
  nb::object templates_object_;
  PythonTemplates* templates_;
  nb::object traces_;
  std::shared_ptr<HeaderFields> headers_;
  std::shared_ptr<HeaderFields> trailers_;
};

// Moves bytes between a transport and an Http2Connection. It holds its owner until it is lost.
class GrpcConnection {
 public:
  // The owner has `take(events)`, `flushed(outcome)`, `hand_over(...)` and an `account`; `calls`
  // are those by stream, to which the plane adds its own. Without an endpoint all calls are
  // Python's.
  GrpcConnection(nb::object http2, nb::object owner, nb::object calls, nb::object endpoint,
                 nb::object idle);

  // `soon` has a callable called in the next turn of the event loop.
  void start(nb::object transport, int descriptor, nb::object soon);
  nb::object get_buffer(nb::handle /*size_hint*/) { return http2_.memory(); }
  void buffer_updated(std::size_t nbytes);
  // The client sends no more: requests that have not ended do so now.
  void end_input();
  // Sends as much as the socket takes; its transport keeps the rest.
  void flush();
  // Has it called once for all that is left to be sent in a turn of the event loop.
  void flush_soon();
  void lose();

  // Of the plane's calls.
  [[nodiscard]] nb::object endpoint() const { return endpoint_object_; }
  [[nodiscard]] Connection& core() { return http2_; }
  [[nodiscard]] const nb::object& account() const { return account_; }
  void forget(std::uint32_t stream);
  // Gives a call to Python, with what has come of a large message: a MessageReceiver, or None;
  // with `end` no more comes. Returns the call there, None if it has ended.
  nb::object hand_over(std::uint32_t stream, const std::shared_ptr<const RequestHeaders>& headers,
                       const nb::object& receiver, bool end);

  bool paused = false;
  // The client sends no more: what is held back is looked at with each flush.
  bool hung_up = false;

 private:
  [[nodiscard]] bool stopped() const;
  void look_idle();
  void send();
  // Takes what has happened; returns whether anything had.
  bool take();
  bool infer(const Event& event);

  nb::object http2_object_;
  PythonConnection& http2_;
  nb::object take_;
  nb::object flushed_;
  nb::object hand_over_;
  nb::object account_;
  nb::object calls_;
  nb::object endpoint_object_;
  GrpcInferEndpoint* endpoint_ = nullptr;
  nb::handle owner_;  // alive until it is lost: the callbacks hold it
  IdlePlace idle_;
  nb::object transport_ = nb::none();
  nb::object soon_ = nb::none();
  int descriptor_ = -1;
  bool flush_due_ = false;
};

// One plain request, with the methods of a Call that its connection uses.
class GrpcInferCall {
 public:
  GrpcInferCall(nb::object connection, const Event& event);

  // Gives the model a request of a whole message; it calls `self` with the outcome. False if it is
  // for Python.
  bool submit(const nb::object& self, const Message& message, const nb::dict& calls);
  // Takes what has come of a message; false if that is for Python, which has the call then.
  bool receive(const nb::object& self, const Event& event, const nb::dict& calls);
  // Hands a message over that is still coming: Python looks how fast.
  void check(nb::handle now, nb::handle window);
  // Takes the outcome, or the pieces of a frame that Python's `frame` was to give later.
  void answer(nb::handle outcome);
  void refuse(nb::handle error);
  void fail(nb::handle error);
  void abort();

 private:
  void take_part(const nb::object& self, const Event& event);
  // Gives the model the request of a large message that is whole.
  void complete(const nb::object& self);
  nb::object hand_over(bool end);
  // Gives a request to its model.
  void give(const MadeRequest& made);
  void close_receiver();
  void finish();
  // Returns the frame of a response, which Python encodes if it is not plain; nothing for one that
  // this is called with when a worker has encoded it.
  std::vector<nb::object> frame(nb::handle outcome) const;

  nb::object connection_object_;
  GrpcConnection* connection_;  // null when it is over
  nb::object endpoint_;
  std::uint32_t stream_;
  std::shared_ptr<const RequestHeaders> headers_;
  nb::object receiver_ = nb::none();  // of a large message that is still coming
  std::shared_ptr<KnownTemplate> known_;
  nb::object request_;
};

}  // namespace gpubridge::http2
