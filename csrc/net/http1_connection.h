// HTTP/1 connections, for Python: gpubridge/_native.pyi has the contract.
//
// A connection owns its reader, the bytes that it could not take yet, and the order of its answers.
// It holds the Python objects of its owner (callbacks) and of its exchanges until it is lost. An
// exchange is owned by its handler, and by its connection until it is answered or the
// connection is lost; from then on it points to no connection, and answering it does nothing.
#pragma once

#include "memory/kept_bytes.h"
#include "memory/sent_buffers.h"
#include "net/http1_inference.h"
#include "net/http1_origins.h"
#include "net/http1_reader.h"
#include "net/idle_connections.h"
#include "net/request_counts.h"
#include "python_object.h"

namespace gpubridge::http1 {

// How long the connection lasts, and how the client learns it.
enum class Persistence : std::uint8_t { kDefault, kKeepAlive, kClose };

// How the client finds the end of a body.
struct Framing {
  // Its length, if that is known.
  std::optional<std::uint64_t> length;
  // It comes in chunks; otherwise one without a length ends with the connection.
  bool chunked = false;
};

inline constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";

class Connection;

// A request, and the place of its answer.
class Exchange {
 public:
  Exchange(Connection& connection, std::unique_ptr<const Head> head, bool close);

  [[nodiscard]] nb::bytes method() const { return bytes_object(head_ ? head_->method() : ""); }
  [[nodiscard]] nb::bytes target() const { return bytes_object(head_ ? head_->target() : ""); }
  [[nodiscard]] nb::object field(nb::bytes name) const;
  [[nodiscard]] nb::object sole_field(nb::bytes name) const;
  [[nodiscard]] nb::list fields() const;
  // Bytes of a body that is received as it is; none for one in chunks or with a coding.
  [[nodiscard]] std::optional<std::uint64_t> length() const;
  [[nodiscard]] bool whole() const;
  [[nodiscard]] bool from_page() const { return head_ != nullptr && head_->from_page(); }
  [[nodiscard]] const char* coding() const {
    if (head_ == nullptr || head_->accepts == Coding::kNone) return nullptr;
    return head_->accepts == Coding::kGzip ? "gzip" : "deflate";
  }
  // Whom the answer is charged to while it waits for its client; None once that is gone.
  [[nodiscard]] nb::object account() const;
  [[nodiscard]] bool lost() const { return connection_ == nullptr || answered_; }

  void receive_into(nb::handle memory, std::uint64_t granted);
  void respond(int status, nb::bytes fields, nb::bytes body, nb::object buffers, bool plain);
  void fail(nb::object error, nb::object status);
  // Fails a request whose body will not be complete.
  void give_up(nb::object error);
  // Sends an answer to an inference request: its header, and the outputs' bytes behind it.
  void respond_tensors(std::string_view header, const SentBuffers& sent, nb::handle buffers);
  // Sends the JSON of a generate request's only response.
  void respond_json(std::string_view json);
  // Sends an event, or nothing, and the end with the last one; begins the answer if it is the
  // first.
  void send_event(std::string_view event, bool last);
  // Has another told from now on when the client has read on.
  void go_on(nb::object on_sent) { on_sent_ = std::move(on_sent); }
  void begin(int status, nb::bytes fields, nb::object on_sent, nb::bytes filler);
  // Sends more of an answer, as one chunk if it has chunks.
  void send(nb::object buffers);
  void end();

  // Takes an inference request whose body lies in a slot; false if it is none for the plane.
  [[nodiscard]] bool infer(nb::object endpoint, nb::object slot, const InferenceBody& body,
                           std::uint64_t copied, nb::handle origin);
  // Answers an inference request by its outcome.
  void answer(nb::handle outcome);
  // Has the owner log an error that is sent within an answer.
  void log_failure(nb::handle error);
  // Its number in the access log; 0 without one.
  [[nodiscard]] std::uint64_t number() const { return access_ == nullptr ? 0 : access_->number; }
  // Notes that a model has the request (InferRequest), and counts what becomes of it.
  void submitted(nb::handle request);
  // Notes whose request it is, until that has it: its `counters`.
  void set_counters(nb::object given);

  int traverse(visitproc visit, void* arg) const;
  void clear();

  nb::object handler = nb::none();
  // Of the model that the request is for, while it has not got it: Python counts a refusal there.
  nb::object counters = nb::none();
  // Its number among the endpoints that are counted.
  std::size_t endpoint = 0;

 private:
  friend class Connection;

  [[nodiscard]] bool modern() const { return head_ == nullptr || head_->modern; }
  [[nodiscard]] bool bodiless() const { return head_ != nullptr && head_->method() == "HEAD"; }
  // It has a handler, or is at a model.
  [[nodiscard]] bool taken() const { return inference_ != nullptr || !handler.is_none(); }
  [[nodiscard]] Persistence persistence() const {
    if (close_) return Persistence::kClose;
    return modern() ? Persistence::kDefault : Persistence::kKeepAlive;
  }
  // Answers a browser that asks whether a listed page may send a request; false if it does not ask.
  [[nodiscard]] bool answer_preflight();
  // Begins to receive an inference request, whose body is charged to `charged`, if it is large;
  // does not where that fails, which is answered. Returns how much of the body there is memory for.
  std::uint64_t begin_inference(nb::handle endpoint, std::uint64_t header, nb::handle charged);
  // Returns as much once so much is there; 0 where there is no more memory, which is answered.
  std::uint64_t grow_inference(std::uint64_t arrived);
  // Gives an inference request, whose body is there, to its model or to Python.
  void complete_inference(std::uint64_t copied);
  [[nodiscard]] bool submit_inference(std::uint64_t copied, nb::handle origin);
  [[nodiscard]] nb::bytes chunk(std::string_view data) const;
  void put(int status, Framing framing, std::string_view fields, std::string_view body,
           const SentBuffers& buffers);
  // `buffers` are those of which `sent` knows the bytes.
  void send_whole(int status, std::string_view fields, std::string_view body,
                  const SentBuffers& sent, nb::handle buffers, bool plain);
  // Counts the answer, whose status is known now.
  void count(int status);
  // Notes the bytes of an answer's body.
  void note_sent(std::uint64_t nbytes) {
    if (access_ != nullptr) access_->sent += nbytes;
  }
  // Ends its record: the answer is sent, or its client is gone.
  void log();
  // Lets go of who answered: nothing more is to come.
  void drop_handler();
  void ready();
  // Says that what was sent of an unfinished answer has left.
  void report_sent();

  Connection* connection_;
  std::unique_ptr<const Head> head_;
  // Shared with its own calls, which may end it.
  std::shared_ptr<Inference> inference_;
  // The bytes of the answer that are there and were not sent.
  std::vector<nb::object> parts_;
  nb::object on_sent_ = nb::none();
  nb::object filler_ = nb::none();
  // For the access log.
  std::unique_ptr<AccessRecord> access_;
  // Bytes of its memory, with its head.
  std::uint64_t kept_ = 0;
  Asker asker_ = Asker::kOwn;
  bool close_;
  bool answered_ = false;
  bool ready_ = false;
  bool unfinished_ = false;
  bool chunked_ = false;
  bool probed_ = false;
};

class Connection {
 public:
  // A connection takes bodies of at most `body_limit` bytes.
  Connection(nb::object owner, nb::object receive, nb::object idle, nb::object targets,
             nb::object origins, nb::object counts, std::uint64_t body_limit);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void start(nb::object write, nb::object write_lines);
  nb::object get_buffer(nb::handle size_hint);
  void buffer_updated(std::size_t nbytes);
  void go_on();
  void end();
  void lose();
  void drain() {
    last_ = true;
    report_changes();
  }
  [[nodiscard]] bool close();
  void set_stalled(bool stalled);
  void refuse(nb::object error, int status);
  void probe();

  [[nodiscard]] bool in_body() const { return current_.exchange != nullptr && !delivered_; }
  [[nodiscard]] bool stopped() const { return stopped_; }
  [[nodiscard]] bool has_pending() const { return !rest_.empty(); }
  [[nodiscard]] bool reading() const { return reading_; }
  [[nodiscard]] std::size_t open() const { return answers_.size(); }
  // Bytes that the client has us keep beside large bodies.
  [[nodiscard]] std::uint64_t kept() const;
  [[nodiscard]] std::uint64_t placed() const { return placed_; }
  [[nodiscard]] nb::tuple progress() const;

  int traverse(visitproc visit, void* arg) const;
  void clear();

  KeptCharge charge;
  // Address and port; only for the access log.
  std::shared_ptr<const std::string> client;

 private:
  friend class Exchange;

  struct Place {
    nb::object object;
    Exchange* exchange = nullptr;
  };

  Place place(std::unique_ptr<const Head> head);
  void feed(const char* at, const char* end);
  void take_head(const char*& at, const char* end);
  // Takes the message whose head is there, unless it is one for the owner. All requests pass here.
  [[nodiscard]] bool take_alone(const Place& message);
  // Takes it if it is an inference request for the plane.
  [[nodiscard]] bool take_inference(Exchange& exchange);
  void take_body(std::string_view piece);
  void complete();
  // Has a client that waits for it send its body, once all answers before that request's are sent.
  void let_continue();
  // Has the owner word a fault, and refuse what is on its way.
  void refuse(Fault fault);
  void receive_into(nb::handle memory, std::uint64_t granted);
  // Asks the owner for memory for more of the body, of which `arrived` bytes are there.
  void grow(std::uint64_t arrived);
  // Counts a request whose client has left before its answer.
  void count_left(Exchange& exchange) const;
  // Drops the rest of an exchange's body.
  void drop_body(const Exchange& exchange);
  // Forgets the message that is on its way; returns it.
  Place drop_message();
  static void abort(Exchange& exchange);
  void flush();
  void write(std::vector<nb::object> parts);
  // Tells the owner what changed: whether to read, and whether all is done.
  void report_changes();
  // Has the owner charge what the client has us keep beside large bodies.
  void charge_kept();

  nb::object owner_;
  nb::object receive_;
  IdlePlace idle_;
  nb::object targets_object_;
  InferTargets* targets_ = nb::cast<InferTargets*>(targets_object_);
  nb::object origins_object_;
  Origins* origins_ = nb::cast<Origins*>(origins_object_);
  nb::object counts_object_;
  RequestCounts* counts_ = nb::cast<RequestCounts*>(counts_object_);
  std::uint64_t body_limit_;
  nb::object take_ = owner_.attr("take");
  nb::object refuse_asker_ = owner_.attr("refuse_asker");
  nb::object check_unread_ = owner_.attr("check_unread");
  nb::object complete_ = owner_.attr("complete");
  nb::object collect_ = owner_.attr("collect");
  nb::object grow_ = owner_.attr("grow");
  nb::object pack_ = owner_.attr("pack");
  nb::object failure_ = owner_.attr("failure");
  nb::object refuse_ = owner_.attr("refuse");
  nb::object changed_ = owner_.attr("changed");
  nb::object charge_ = owner_.attr("charge");
  nb::object write_ = nb::none();
  nb::object write_lines_ = nb::none();

  // Bytes of the exchanges that are not answered, with their heads.
  std::uint64_t kept_ = 0;
  Reader reader_;
  std::string rest_;

  // The message on its way: its body so far, and what of it came with the head.
  Place current_;
  std::uint64_t length_ = 0;
  // Bytes of it that may be received now.
  std::uint64_t granted_ = 0;
  std::uint64_t copied_ = 0;
  // Bytes of a body in chunks or with a coding.
  std::optional<std::uint64_t> framed_;
  std::string_view at_hand_;
  nb::object memory_ = nb::none();
  nb::object collected_ = nb::none();
  bool delivered_ = false;
  // Its client waits for an interim answer before it sends the body, of which nothing is there.
  bool waits_to_continue_ = false;
  // The last buffer that was asked for is the body's own memory.
  bool direct_ = false;

  std::deque<Place> answers_;
  std::uint64_t placed_ = 0;

  bool reading_ = true;
  bool stalled_ = false;
  // No request is read after the one that is on its way.
  bool last_ = false;
  // Nothing is read any more.
  bool stopped_ = false;
  // The client was cut off: it may still be sending.
  bool unread_ = false;
  // The answer that ends the connection is sent.
  bool done_ = false;
  bool closing_ = false;
  bool lost_ = false;
};

}  // namespace gpubridge::http1
