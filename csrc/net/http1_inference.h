// Plain inference and generate requests over HTTP/1, from the head of a message to its answer,
// without Python code: those that have a template, and whose outputs a template writes. All others
// are handed to Python, which parses the same bytes anew.
#pragma once

#include "heap_type.h"
#include "net/http1_reader.h"
#include "net/required_field.h"
#include "python_object.h"
#include "request/templates_binding.h"
#include "request/trace_sampling.h"
#include "text.h"

namespace gpubridge::http1 {

class Exchange;

// One version of a model as its endpoint serves it: `given` is a ServedModel
// (gpubridge/frontend/infer.py).
struct ServedModel {
  explicit ServedModel(nb::object given) : given(std::move(given)) {}

  int traverse(visitproc visit, void* arg) const {
    return visit_all({&given, &templates_object, &sampling_object, &submit, &counters}, visit, arg);
  }

  nb::object given;
  nb::object templates_object = given.attr("templates");
  PythonTemplates& templates = nb::cast<PythonTemplates&>(templates_object);
  nb::object sampling_object = given.attr("sampling");
  TraceSampling& sampling = nb::cast<TraceSampling&>(sampling_object);
  nb::object submit = given.attr("submit");
  nb::object counters = given.attr("statistics");
  std::uint64_t inputs = nb::cast<std::uint64_t>(given.attr("inputs"));
};

// The text of a longer answer is charged: _LONG of gpubridge/frontend/answer_texts.py.
inline constexpr std::size_t kLongText = std::size_t{1} << 16U;

// What an endpoint answers: inference requests; generate requests by one response, or by events.
enum class EndpointKind : std::uint8_t { kInfer = 0, kGenerate = 1, kGenerateStream = 2 };

// Where requests for a model, or for one version of it, go; the base of the classes InferEndpoint
// and GenerateEndpoint.
class InferEndpoint {
 public:
  InferEndpoint(nb::object arena, EndpointKind kind) : arena_(std::move(arena)), kind_(kind) {}

  [[nodiscard]] EndpointKind kind() const { return kind_; }
  // Its number among the endpoints that are counted: Python's INFER and those after it
  // (gpubridge/frontend/answered.py).
  [[nodiscard]] std::size_t number() const { return 1 + static_cast<std::size_t>(kind_); }
  [[nodiscard]] bool generates() const { return kind_ != EndpointKind::kInfer; }

  // Another takes the model's place, also for requests whose body is still being received.
  void set_model(nb::object served) {
    served_ = std::make_shared<const ServedModel>(std::move(served));
  }

  [[nodiscard]] const std::shared_ptr<const ServedModel>& served() const { return served_; }
  // True if a request may be traced: then Python takes it.
  [[nodiscard]] bool traced(const Head& head) const {
    return served_->sampling.takes([&] { return head.field("traceparent"); });
  }
  // A slot for a body of so many bytes, charged to `charged`, if it is large: then `grow` hands its
  // memory out up to where the body ends, and `complete` says that it is there.
  [[nodiscard]] nb::object allocate(std::uint64_t nbytes, nb::handle charged) const;
  [[nodiscard]] const nb::object& arena() const { return arena_; }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(arena_.ptr());
    // What a request shares is not for the collector alone.
    return served_.use_count() == 1 ? served_->traverse(visit, arg) : 0;
  }
  void clear() { served_.reset(); }

 private:
  nb::object arena_;
  EndpointKind kind_;
  std::shared_ptr<const ServedModel> served_;
};

// The endpoints by the targets of their requests, as clients write them.
class InferTargets {
 public:
  // Requests without a required field are for Python.
  explicit InferTargets(std::shared_ptr<RequiredField> required) : required_(std::move(required)) {}
  void add(const nb::bytes& target, nb::object endpoint) {
    endpoints_.insert_or_assign(std::string(view_of(target)), std::move(endpoint));
  }
  void remove(nb::handle endpoint) {
    std::erase_if(endpoints_, [&](const auto& entry) { return entry.second.is(endpoint); });
  }
  void clear() { const auto dropped = std::exchange(endpoints_, {}); }
  [[nodiscard]] std::size_t size() const { return endpoints_.size(); }
  int traverse(visitproc visit, void* arg) const {
    for (const auto& [target, endpoint] : endpoints_) Py_VISIT(endpoint.ptr());
    return 0;
  }
  // The endpoint, or a null handle.
  [[nodiscard]] nb::handle find(std::string_view target) const {
    const auto found = endpoints_.find(target);
    return found == endpoints_.end() ? nb::handle() : nb::handle(found->second);
  }
  // The required field is there, once.
  [[nodiscard]] bool admits(const Head& head) const;

 private:
  std::shared_ptr<const RequiredField> required_;
  std::unordered_map<std::string, nb::object, TextHash, std::equal_to<>> endpoints_;
};

// Bytes of a body of `length` that are its JSON header; nothing where the client's number is none.
[[nodiscard]] std::optional<std::uint64_t> header_size(const Head& head, std::uint64_t length);

// Where a body begins in its slot, its bytes, and those of its JSON header.
struct InferenceBody {
  std::uint64_t start = 0;
  std::uint64_t length = 0;
  std::uint64_t header = 0;
};

// One request. It owns the slot of its body until a model has the request.
class Inference {
 public:
  // With a slot for a body of so many bytes, a large one charged to `charged`.
  Inference(nb::object endpoint, std::uint64_t length, std::uint64_t header, nb::handle charged);
  // With a body that lies in a slot.
  Inference(nb::object endpoint, nb::object slot, const InferenceBody& body);

  // The place of the body.
  [[nodiscard]] nb::object memory() const {
    return slice_of(attribute<"memory">(slot_), body_.start, body_.start + body_.length);
  }
  void put(std::string_view begin) const;
  // Returns how much of a large body there is memory for, once so much is there.
  [[nodiscard]] std::uint64_t grow(std::uint64_t arrived) const;
  // Notes that a large body is whole.
  void complete() const {
    if (large_) attribute<"complete">(endpoint_.arena())(slot_);
  }

  // Gives the request to the model, `copied` bytes of whose body were copied, and has the exchange
  // called with the outcome, even before this returns. False if it is for Python.
  [[nodiscard]] bool submit(nb::handle exchange, std::uint64_t copied, nb::handle origin);
  // Hands the request to Python.
  void hand_over(nb::handle exchange, std::uint64_t copied) {
    const nb::object slot = std::move(slot_);
    attribute<"take_over">(endpoint_object_)(exchange, slot, body_.start, body_.length, copied);
  }
  // Answers by an outcome. A generate request has several, all of which but the last come while it
  // has an `on_done`.
  void answer(Exchange& exchange, nb::handle outcome);
  [[nodiscard]] bool has_last() const;
  // Lets the model send more: the client has read the events so far. This may be gone then.
  void pass_on();
  void abort();

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(slot_.ptr());
    Py_VISIT(request_.ptr());
    return visit_all({&endpoint_object_, &only_, &follower_}, visit, arg);
  }

 private:
  void answer_infer(Exchange& exchange, nb::handle outcome) const;
  // Writes what is to be sent for an outcome of a generate request; false where that is Python's.
  [[nodiscard]] bool write(nb::handle outcome, bool last, std::string& text) const;
  void send(Exchange& exchange, nb::handle outcome, bool last, std::string_view text);
  [[nodiscard]] bool append_json(nb::handle outcome, std::string& json) const;
  [[nodiscard]] nb::object identifier() const;

  nb::object endpoint_object_;
  InferEndpoint& endpoint_;
  nb::object slot_;
  InferenceBody body_;
  bool large_ = false;
  // From here on, when a model has it. By the time of the answer the endpoint may lead to another.
  std::shared_ptr<const ServedModel> served_;
  std::shared_ptr<KnownTemplate> known_;
  nb::object request_;
  // Of a generate request: the response that came before the end, the events that were not passed
  // on, and the handler that answers once Python does.
  nb::object only_ = nb::none();
  long long unsent_ = 0;
  nb::object follower_ = nb::none();
};

}  // namespace gpubridge::http1
