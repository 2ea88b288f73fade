// Answers to generate requests: one JSON object, or an event for each response.
//
// The plane writes those that have a template. From the first other outcome on (an error,
// parameters, long values) a handler in Python answers, in the same order.

#include "ipc/infer_request_binding.h"
#include "net/http1_connection.h"
#include "net/http1_inference.h"
#include "python_object.h"
#include "request/responses_binding.h"

namespace gpubridge::http1 {

bool Inference::has_last() const {
  return !endpoint_.generates() || !infer_request(request_).has(InferRequest::kOnDone);
}

void Inference::answer(Exchange& exchange, nb::handle outcome) {
  if (!endpoint_.generates()) {
    answer_infer(exchange, outcome);
    return;
  }
  const bool last = has_last();
  nb::object given = nb::borrow(outcome);
  if (follower_.is_none()) {
    std::string text;
    bool written = false;
    try {
      written = write(outcome, last, text);
    } catch (nb::python_error& error) {
      given = nb::borrow(error.value());
    }
    if (written) {
      send(exchange, outcome, last, text);
      return;
    }
    follower_ = attribute<"follow">(endpoint_object_)(served_->given, nb::find(exchange), request_,
                                                      unsent_, only_);
  }
  attribute<"take_outcome">(follower_)(given, last);
}

bool Inference::write(nb::handle outcome, bool last, std::string& text) const {
  if (endpoint_.kind() == EndpointKind::kGenerateStream) {
    if (outcome.is_none()) return true;
    text = "data: ";
    if (!append_json(outcome, text)) return false;
    text += "\n\n";
    return true;
  }
  // One response, which may come before the end.
  if (!last) return only_.is_none() && is_infer_response(outcome);
  if (outcome.is_none() == only_.is_none()) return false;
  return append_json(outcome.is_none() ? nb::handle(only_) : outcome, text);
}

void Inference::send(Exchange& exchange, nb::handle outcome, bool last, std::string_view text) {
  if (endpoint_.kind() == EndpointKind::kGenerateStream) {
    if (!last) ++unsent_;
    exchange.send_event(text, last);
  } else if (last && text.size() > kLongText) {
    attribute<"respond_text">(served_->given)(nb::find(exchange), long_bytes_object(text));
  } else if (last) {
    exchange.respond_json(text);
  } else {
    only_ = nb::borrow(outcome);
    infer_request(request_).passed_on(1);
  }
}

bool Inference::append_json(nb::handle outcome, std::string& json) const {
  if (!is_infer_response(outcome)) return false;
  const InferResponse& response = infer_response(outcome);
  if (response.has(InferResponse::kParameters)) return false;
  const nb::handle signature = response.get(InferResponse::kSignature);
  const nb::object known = known_->answer(
      signature, [&] { return attribute<"plain_template">(served_->given)(signature); });
  if (known.is_none()) return false;
  return append_generated(nb::cast<const GeneratedTemplate&>(known), view_of_text(identifier()),
                          response.get(InferResponse::kShapes),
                          response.get(InferResponse::kBuffers), json);
}

void Inference::pass_on() {
  const long long unsent = std::exchange(unsent_, 0);
  const nb::object request = request_;
  if (unsent != 0 && request.is_valid()) infer_request(request).passed_on(unsent);
}

}  // namespace gpubridge::http1
