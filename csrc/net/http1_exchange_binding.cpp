
#include "memory/sent_buffers.h"
#include "net/access_log_binding.h"
#include "net/http1_connection.h"
#include "python_object.h"

namespace gpubridge::http1 {
namespace {

// Buffers of so many bytes together are copied to what comes before them, as are short ones: one
// piece of a write more costs more.
constexpr std::size_t kCopied = 2048;
constexpr std::size_t kCopiedBuffer = 1024;
constexpr std::size_t kUsualHead = 128;
// Bodies of fewer bytes are not compressed for clients that accept several codings: with their head
// they are one packet either way.
constexpr std::size_t kCompressed = 1024;
constexpr std::string_view kJsonFields = "Content-Type: application/json\r\n";
constexpr std::string_view kLastChunk = "0\r\n\r\n";

// "Not Allowed" is Triton's word.
constexpr std::array<std::pair<int, std::string_view>, 15> kReasons{{
    {200, "OK"},
    {400, "Bad Request"},
    {401, "Unauthorized"},
    {403, "Forbidden"},
    {404, "Not Found"},
    {405, "Not Allowed"},
    {408, "Request Timeout"},
    {411, "Length Required"},
    {413, "Content Too Large"},
    {415, "Unsupported Media Type"},
    {429, "Too Many Requests"},
    {431, "Request Header Fields Too Large"},
    {500, "Internal Server Error"},
    {501, "Not Implemented"},
    {503, "Service Unavailable"},
}};

std::string response_head(int status, std::string_view fields, Framing framing,
                          Persistence persistence) {
  const auto reason =
      std::ranges::find(kReasons, status, [](const auto& each) { return each.first; });
  if (reason == kReasons.end()) throw nb::value_error("expected a status that has a reason");
  std::string head;
  head.reserve(kUsualHead + fields.size());
  head.append("HTTP/1.1 ");
  append_integer(head, status);
  head.append(" ").append(reason->second).append("\r\n").append(fields);
  if (framing.length) {
    head.append("Content-Length: ");
    append_integer(head, *framing.length);
    head.append("\r\n");
  } else if (framing.chunked) {
    head.append("Transfer-Encoding: chunked\r\n");
  }
  if (persistence == Persistence::kClose) head.append("Connection: close\r\n");
  if (persistence == Persistence::kKeepAlive) head.append("Connection: keep-alive\r\n");
  return head.append("\r\n");
}

// The line before a chunk's bytes; a line end follows them.
std::string chunk_line(std::size_t nbytes) {
  std::string line;
  append_integer(line, nbytes, 16);
  return line.append("\r\n");
}

}  // namespace

Exchange::Exchange(Connection& connection, std::unique_ptr<const Head> head, bool close)
    : connection_(&connection), head_(std::move(head)), close_(close) {}

int Exchange::traverse(visitproc visit, void* arg) const {
  for (const nb::object& part : parts_) Py_VISIT(part.ptr());
  if (inference_ != nullptr) inference_->traverse(visit, arg);
  return visit_all({&handler, &counters, &on_sent_, &filler_}, visit, arg);
}

void Exchange::clear() {
  const auto inference = std::move(inference_);
  const auto parts = std::exchange(parts_, {});
  drop_all({&handler, &counters, &on_sent_, &filler_});
}

nb::object Exchange::field(nb::bytes name) const {
  if (head_ == nullptr) return nb::none();
  const auto value = head_->field(view_of(name));
  return value ? nb::object(bytes_object(*value)) : nb::none();
}

nb::object Exchange::sole_field(nb::bytes name) const {
  const auto value = head_ == nullptr ? std::nullopt : head_->sole_field(view_of(name));
  return value ? nb::object(bytes_object(*value)) : nb::none();
}

nb::object Exchange::account() const {
  return connection_ == nullptr ? nb::none() : nb::object(connection_->owner_.attr("account"));
}

nb::list Exchange::fields() const {
  nb::list all;
  if (head_ == nullptr) return all;
  for (const auto& [name, value] : head_->fields()) {
    all.append(nb::make_tuple(bytes_object(name), bytes_object(value)));
  }
  return all;
}

std::optional<std::uint64_t> Exchange::length() const {
  if (head_ == nullptr) return 0;
  if (head_->chunked || head_->coded) return std::nullopt;
  return head_->length;
}

bool Exchange::whole() const {
  return connection_ != nullptr && connection_->current_.exchange == this &&
         connection_->delivered_;
}

void Exchange::receive_into(nb::handle memory, std::uint64_t granted) {
  if (connection_ == nullptr || connection_->current_.exchange != this) {
    throw nb::value_error("expected a request whose body is to come");
  }
  connection_->receive_into(memory, granted);
}

void Exchange::put(int status, Framing framing, std::string_view fields, std::string_view body,
                   const SentBuffers& buffers) {
  count(status);
  const bool joined = buffers.total() <= kCopied;
  std::string readable;
  if (asker_ == Asker::kListed) {
    readable = readable_fields(*head_).append(fields);
    fields = readable;
  }
  std::string opening = response_head(status, fields, framing, persistence());
  opening.reserve(opening.size() + body.size() + (joined ? buffers.total() : 0));
  if (!bodiless()) {
    opening.append(body);
    note_sent(body.size() + buffers.total());
  }
  MessagePieces pieces(std::move(opening), joined ? kCopied : kCopiedBuffer);
  for (std::size_t index = 0; index < buffers.count() && !bodiless(); ++index) {
    pieces.append({}, buffers, index);
  }
  for (nb::object& piece : pieces.finish()) parts_.push_back(std::move(piece));
  ready();
}

void Exchange::respond(int status, nb::bytes fields, nb::bytes body, nb::object buffers,
                       bool plain) {
  send_whole(status, view_of(fields), view_of(body), SentBuffers(buffers), buffers, plain);
}

void Exchange::respond_tensors(std::string_view header, const SentBuffers& sent,
                               nb::handle buffers) {
  std::string fields(kJsonFields);
  // Without a byte after it, the JSON is the whole answer: so it is at Triton.
  if (sent.total() != 0) {
    fields = "Content-Type: application/octet-stream\r\nInference-Header-Content-Length: " +
             std::to_string(header.size()) + "\r\n";
  }
  send_whole(200, fields, header, sent, buffers, false);
}

void Exchange::send_whole(int status, std::string_view fields, std::string_view body,
                          const SentBuffers& sent, nb::handle buffers, bool plain) {
  if (connection_ == nullptr || answered_) return;
  drop_handler();
  const std::size_t length = body.size() + sent.total();
  const bool may_pack = !plain && head_ != nullptr && head_->accepts != Coding::kNone;
  if (may_pack && length >= (head_->accepts_one ? 1 : kCompressed)) {
    const nb::object pack = connection_->pack_;
    pack(nb::find(*this), status, bytes_object(fields), bytes_object(body), buffers);
    return;
  }
  put(status, {length, false}, fields, body, sent);
}

void Exchange::give_up(nb::object error) {
  Connection::abort(*this);
  fail(std::move(error), nb::none());
}

void Exchange::fail(nb::object error, nb::object status) {
  if (connection_ == nullptr || answered_) return;
  handler = nb::none();
  connection_->drop_body(*this);
  const nb::object failure = connection_->failure_;
  const nb::object answer = failure(error, status, nb::find(*this));
  const SentBuffers body(answer[1]);
  put(nb::cast<int>(answer[0]), {body.total(), false}, kJsonFields, {}, body);
}

void Exchange::log_failure(nb::handle error) {
  if (connection_ != nullptr) connection_->owner_.attr("log_failure")(error, nb::find(*this));
}

void Exchange::count(int status) {
  connection_->counts_->count(endpoint, status);
  if (access_ != nullptr) access_->status = status;
}

void Exchange::log() {
  if (access_ == nullptr) return;
  access_->endpoint = endpoint;
  connection_->counts_->log(std::move(access_));
}

void Exchange::set_counters(nb::object given) {
  if (access_ != nullptr && !given.is_none()) note_model(*access_, given);
  counters = std::move(given);
}

void Exchange::submitted(nb::handle request) {
  counters = nb::none();
  if (access_ != nullptr) note_identifier(*access_, request);
}

bool Exchange::answer_preflight() {
  const auto fields = preflight_fields(*head_);
  if (!fields) return false;
  connection_->drop_body(*this);
  put(200, {0, false}, *fields, {}, SentBuffers(nb::tuple()));
  return true;
}

// -- inference ------------------------------------------------------------------------------------

std::uint64_t Exchange::begin_inference(nb::handle endpoint, std::uint64_t header,
                                        nb::handle charged) {
  const auto& asked = nb::cast<const InferEndpoint&>(endpoint);
  this->endpoint = asked.number();
  set_counters(asked.served()->counters);
  try {
    inference_ = std::make_shared<Inference>(nb::borrow(endpoint), head_->length, header, charged);
  } catch (nb::python_error& error) {
    fail(nb::borrow(error.value()), nb::none());
    return 0;
  }
  return charged.is_none() ? head_->length : grow_inference(0);
}

std::uint64_t Exchange::grow_inference(std::uint64_t arrived) {
  try {
    return inference_->grow(arrived);
  } catch (nb::python_error& error) {
    give_up(nb::borrow(error.value()));
    return 0;
  }
}

void Exchange::complete_inference(std::uint64_t copied) {
  inference_->complete();
  if (submit_inference(copied, nb::none())) return;
  const std::shared_ptr<Inference> inference = std::move(inference_);
  inference->hand_over(nb::find(*this), copied);
}

// By the time that the model has it, it may have been answered.
bool Exchange::submit_inference(std::uint64_t copied, nb::handle origin) {
  try {
    return inference_->submit(nb::find(*this), copied, origin);
  } catch (nb::python_error& error) {
    if (const auto inference = std::move(inference_)) inference->abort();
    fail(nb::borrow(error.value()), nb::none());
    return true;
  }
}

bool Exchange::infer(nb::object endpoint, nb::object slot, const InferenceBody& body,
                     std::uint64_t copied, nb::handle origin) {
  inference_ = std::make_shared<Inference>(std::move(endpoint), std::move(slot), body);
  if (submit_inference(copied, origin)) {
    handler = nb::none();
    return true;
  }
  inference_.reset();
  return false;
}

void Exchange::answer(nb::handle outcome) {
  const std::shared_ptr<Inference> inference = inference_;
  if (inference == nullptr) return;
  if (inference->has_last()) inference_.reset();
  try {
    inference->answer(*this, outcome);
  } catch (nb::python_error& error) {
    fail(nb::borrow(error.value()), nb::none());
  }
}

void Exchange::drop_handler() {
  const nb::object dropped = std::exchange(handler, nb::none());
  inference_.reset();
}

void Exchange::respond_json(std::string_view json) {
  const nb::tuple nothing;
  send_whole(200, kJsonFields, json, SentBuffers(nothing), nothing, true);
}

void Exchange::send_event(std::string_view event, bool last) {
  constexpr std::string_view kEventFields = "Content-Type: text/event-stream; charset=utf-8\r\n";
  if (connection_ == nullptr) return;
  std::string text;
  if (!answered_) {
    chunked_ = modern();
    if (!chunked_) close_ = true;
    filler_ = bytes_object(":\n\n");  // A comment, which readers of events ignore.
    text = response_head(200, kEventFields, {std::nullopt, chunked_}, persistence());
    count(200);
  }
  unfinished_ = !last;
  note_sent(event.size());
  if (!event.empty() && chunked_) text.append(chunk_line(event.size()));
  text.append(event);
  if (!event.empty() && chunked_) text.append("\r\n");
  if (last && chunked_) text.append(kLastChunk);
  if (!text.empty()) parts_.push_back(bytes_object(text));
  probed_ = false;
  ready();
}

void Exchange::report_sent() {
  const nb::object on_sent = on_sent_;
  if (!on_sent.is_none()) {
    on_sent();
  } else if (const std::shared_ptr<Inference> inference = inference_) {
    inference->pass_on();
  }
}

void Exchange::begin(int status, nb::bytes fields, nb::object on_sent, nb::bytes filler) {
  if (connection_ == nullptr || answered_) return;
  chunked_ = modern();
  if (!chunked_) close_ = true;
  unfinished_ = true;
  on_sent_ = std::move(on_sent);
  filler_ = std::move(filler);
  put(status, {std::nullopt, chunked_}, view_of(fields), {}, SentBuffers(nb::tuple()));
}

nb::bytes Exchange::chunk(std::string_view data) const {
  if (!chunked_) return bytes_object(data);
  return bytes_object(chunk_line(data.size()).append(data).append("\r\n"));
}

void Exchange::send(nb::object buffers) {
  const SentBuffers sent(buffers);
  if (connection_ == nullptr || bodiless() || sent.total() == 0) return;
  MessagePieces pieces(chunked_ ? chunk_line(sent.total()) : std::string(), kCopiedBuffer);
  for (std::size_t index = 0; index < sent.count(); ++index) pieces.append({}, sent, index);
  for (nb::object& piece : pieces.finish(chunked_ ? "\r\n" : "")) {
    parts_.push_back(std::move(piece));
  }
  note_sent(sent.total());
  probed_ = false;
  ready();
}

void Exchange::end() {
  if (connection_ == nullptr) return;
  drop_handler();
  unfinished_ = false;
  if (chunked_ && !bodiless()) parts_.push_back(bytes_object(kLastChunk));
  probed_ = false;
  ready();
}

void Exchange::ready() {
  answered_ = true;
  ready_ = true;
  connection_->flush();
}

}  // namespace gpubridge::http1
