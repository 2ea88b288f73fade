
#include "buffer_view.h"
#include "heap_type.h"
#include "net/http1_connection.h"
#include "std.h"

namespace gpubridge::http1 {
namespace {

// Larger bodies are charged by themselves. Of a body whose length is not known so much is taken
// before the owner is asked.
constexpr std::size_t kHeavy = std::size_t{64} << 10U;
// Bytes of memory of an open request beside its head and body, about.
constexpr std::uint64_t kOfExchange = 1024;

enum Stage { kNothing, kHead, kBody };

void append(const nb::object& array, std::string_view data) {
  const Py_ssize_t size = PyByteArray_Size(array.ptr());
  if (PyByteArray_Resize(array.ptr(), size + static_cast<Py_ssize_t>(data.size())) != 0) {
    throw nb::python_error();
  }
  std::memcpy(PyByteArray_AsString(array.ptr()) + size, data.data(), data.size());
}

// Calls back. What is called may let go of the connection's references to it.
template <typename... Arguments>
void call(nb::object callback, Arguments&&... arguments) {
  callback(std::forward<Arguments>(arguments)...);
}

}  // namespace

Connection::Connection(nb::object owner, nb::object receive, nb::object idle, nb::object targets,
                       nb::object origins, nb::object counts, std::uint64_t body_limit)
    : owner_(std::move(owner)),
      receive_(std::move(receive)),
      idle_(std::move(idle)),
      targets_object_(std::move(targets)),
      origins_object_(std::move(origins)),
      counts_object_(std::move(counts)),
      body_limit_(body_limit) {}

Connection::~Connection() {
  idle_.leave();
  for (const Place& place : answers_) place.exchange->connection_ = nullptr;
}

void Connection::start(nb::object write, nb::object write_lines) {
  write_ = std::move(write);
  write_lines_ = std::move(write_lines);
  report_changes();
}

// -- bytes in -------------------------------------------------------------------------------------

nb::object Connection::get_buffer(nb::handle) {
  direct_ = !memory_.is_none();
  if (!direct_) return receive_;
  return slice_of(memory_, length_ - reader_.missing(), granted_);
}

void Connection::buffer_updated(std::size_t nbytes) {
  idle_.leave();
  if (nbytes != 0) waits_to_continue_ = false;
  if (!direct_) {
    const BufferView received(receive_, PyBUF_SIMPLE);
    if (nbytes > received.size()) throw nb::value_error("expected bytes within the buffer");
    const char* const begin = static_cast<const char*>(received.data());
    feed(begin, begin + nbytes);
  } else if (!memory_.is_none()) {
    const std::uint64_t arrived = length_ - reader_.missing() + nbytes;
    if (arrived > granted_) throw nb::value_error("expected bytes within the buffer");
    reader_.skip(nbytes);
    if (reader_.missing() == 0) {
      feed(nullptr, nullptr);
    } else if (arrived == granted_) {
      grow(arrived);
    }
  }
  report_changes();
}

void Connection::go_on() {
  const std::string rest = std::move(rest_);
  rest_.clear();
  idle_.leave();
  feed(rest.data(), rest.data() + rest.size());
  report_changes();
}

void Connection::feed(const char* at, const char* end) {
  while (!stopped_) {
    if (reader_.at_start()) {
      if (at == end) return;
      if (stalled_) {
        rest_.assign(at, end);
        return;
      }
    }
    switch (reader_.step(at, end)) {
      case Reader::Step::kMore:
        return;
      case Reader::Step::kHead:
        take_head(at, end);
        break;
      case Reader::Step::kBody:
        take_body(reader_.body());
        break;
      case Reader::Step::kEnd:
        complete();
        break;
      case Reader::Step::kFault:
        refuse(reader_.fault());
        return;
    }
  }
}

void Connection::take_head(const char*& at, const char* end) {
  auto head = std::make_unique<const Head>(reader_.take_head());
  const bool framed = head->chunked || head->coded;
  const bool expects = head->expects;
  const auto here = static_cast<std::size_t>(end - at);
  length_ = framed ? 0 : head->length;
  copied_ = 0;
  framed_.reset();
  if (framed) {
    framed_ = 0;
    granted_ = kHeavy;
    collected_ = checked(PyByteArray_FromStringAndSize(nullptr, 0));
  }
  const bool too_long = head->length > body_limit_;
  delivered_ = !framed && !expects && !too_long && here >= length_;
  const Place message = current_ = place(std::move(head));
  if (too_long) {
    refuse(Fault::kBodyTooLong);
    return;
  }
  at_hand_ = {at, static_cast<std::size_t>(std::min<std::uint64_t>(length_, here))};
  if (!take_alone(message)) call(take_, message.object);
  at_hand_ = {};
  if (stopped_) return;
  at += copied_;
  reader_.skip(copied_);
  waits_to_continue_ = expects && message.exchange->taken();
  let_continue();
  // It goes on without being told.
  if (copied_ != 0 || at != end) waits_to_continue_ = false;
}

void Connection::let_continue() {
  const bool turn = !answers_.empty() && answers_.front().exchange == current_.exchange;
  if (!waits_to_continue_ || !turn || closing_ || done_) return;
  waits_to_continue_ = false;
  if (current_.exchange->taken()) call(write_, bytes_object(kContinue));
}

bool Connection::take_alone(const Place& message) {
  Exchange& exchange = *message.exchange;
  exchange.asker_ = origins_->asker(*exchange.head_);
  if (exchange.asker_ == Asker::kOther || exchange.asker_ == Asker::kOtherHost) {
    call(refuse_asker_, message.object, exchange.asker_ == Asker::kOtherHost);
    return true;
  }
  if (exchange.asker_ == Asker::kListed && exchange.answer_preflight()) return true;
  return take_inference(exchange);
}

bool Connection::take_inference(Exchange& exchange) {
  const Head& head = *exchange.head_;
  if (length_ == 0 || head.method() != "POST") return false;
  const nb::handle endpoint = targets_->find(head.target());
  if (!endpoint.is_valid() || !targets_->admits(head) ||
      nb::cast<InferEndpoint&>(endpoint).traced(head)) {
    return false;
  }
  const bool generates = nb::cast<InferEndpoint&>(endpoint).generates();
  if (generates && length_ > kHeavy) return false;
  const auto header = generates ? length_ : header_size(head, length_);
  if (!header) return false;
  nb::object charged = nb::none();
  if (length_ > kHeavy) charged = owner_.attr("new_body")(current_.object);
  granted_ = std::min(length_, exchange.begin_inference(endpoint, *header, charged));
  if (exchange.inference_ == nullptr) return true;
  exchange.inference_->put(at_hand_);
  copied_ = at_hand_.size();
  at_hand_ = {};
  if (delivered_) {
    exchange.complete_inference(copied_);
  } else {
    memory_ = exchange.inference_->memory();
  }
  return true;
}

void Connection::receive_into(nb::handle memory, std::uint64_t granted) {
  const BufferView view(memory, PyBUF_WRITABLE);
  granted_ = std::min(granted, length_);
  if (view.size() < granted_) throw nb::value_error("expected memory for what was granted");
  if (granted_ <= at_hand_.size() && granted_ < length_) {
    throw nb::value_error("expected memory for more than is there");
  }
  if (!at_hand_.empty()) std::memcpy(view.data(), at_hand_.data(), at_hand_.size());
  copied_ = at_hand_.size();
  at_hand_ = {};
  if (!delivered_) memory_ = nb::borrow(memory);
}

void Connection::grow(std::uint64_t arrived) {
  const nb::object grow = grow_;
  const Place message = current_;
  const auto granted = message.exchange->inference_ != nullptr
                           ? message.exchange->grow_inference(arrived)
                           : nb::cast<std::uint64_t>(grow(message.object, arrived));
  if (memory_.is_none() && collected_.is_none()) return;
  const bool more = granted > arrived || (framed_ && granted == arrived);
  if (!more) throw nb::value_error("expected memory for more of the body");
  granted_ = framed_ ? granted : std::min(granted, length_);
}

void Connection::drop_body(const Exchange& exchange) {
  if (current_.exchange != &exchange) return;
  memory_ = nb::none();
  collected_ = nb::none();
}

void Connection::take_body(std::string_view piece) {
  // By its length a body is received where it belongs, or dropped.
  if (!framed_) return;
  *framed_ += piece.size();
  if (*framed_ > body_limit_) {
    refuse(Fault::kChunksTooLong);
    return;
  }
  if (!collected_.is_none() && *framed_ > granted_) grow(*framed_);
  if (collected_.is_none()) return;
  const Place message = current_;
  attempt([&] { append(collected_, piece); },
          [&](const nb::object& error) { message.exchange->give_up(error); });
}

void Connection::complete() {
  const bool delivered = delivered_;
  const std::uint64_t copied = copied_;
  const nb::object collected = std::move(collected_);
  const Place message = drop_message();
  if (message.exchange->access_ != nullptr && framed_) {
    message.exchange->access_->received = *framed_;
  }
  if (message.exchange->close_) stopped_ = true;
  // Without a handler it was answered by its head.
  if (delivered || !message.exchange->taken()) return;
  if (!collected.is_none()) {
    call(collect_, message.object, collected);
    return;
  }
  if (message.exchange->inference_ != nullptr) {
    message.exchange->complete_inference(copied);
  } else {
    call(complete_, message.object, copied);
  }
}

void Connection::refuse(Fault fault) {
  const nb::object exchange = current_.exchange == nullptr ? nb::none() : current_.object;
  call(refuse_, static_cast<int>(fault), exchange);
}

Connection::Place Connection::drop_message() {
  Place message = std::move(current_);
  current_ = {};
  memory_ = nb::none();
  collected_ = nb::none();
  delivered_ = waits_to_continue_ = false;
  return message;
}

// -- how it ends ----------------------------------------------------------------------------------

void Connection::abort(Exchange& exchange) {
  const nb::object handler = std::exchange(exchange.handler, nb::none());
  if (!handler.is_none()) handler.attr("abort")();
  if (const auto inference = std::move(exchange.inference_)) inference->abort();
}

void Connection::refuse(nb::object error, int status) {
  if (lost_) return;
  Place message = drop_message();
  stopped_ = unread_ = true;
  if (message.exchange != nullptr) {
    abort(*message.exchange);
    if (message.exchange->answered_) {
      // It was refused before for another reason, which is its answer.
      last_ = true;
      report_changes();
      return;
    }
  } else {
    message = place(nullptr);
  }
  message.exchange->close_ = true;
  message.exchange->fail(std::move(error), nb::int_(status));
}

void Connection::end() {
  last_ = stopped_ = true;
  unread_ = false;
  if (!in_body()) return;
  const Place message = drop_message();
  if (!message.exchange->answered_) {
    answers_.pop_back();
    kept_ -= message.exchange->kept_;
    count_left(*message.exchange);
    message.exchange->connection_ = nullptr;
  }
  abort(*message.exchange);
}

void Connection::count_left(Exchange& exchange) const {
  constexpr int kClientLeft = 499;  // nginx's number for it
  if (!exchange.answered_) exchange.count(kClientLeft);
  exchange.log();
}

void Connection::lose() {
  lost_ = stopped_ = closing_ = true;
  idle_.leave();
  drop_message();
  rest_.clear();
  const std::deque<Place> answers = std::move(answers_);
  answers_.clear();
  kept_ = 0;
  // From here on nothing of this connection's owner is held, which holds this connection.
  drop_all({&owner_, &take_, &refuse_asker_, &complete_, &collect_, &grow_, &pack_, &failure_,
            &refuse_, &changed_, &charge_, &write_, &write_lines_, &check_unread_});
  for (const Place& place : answers) {
    count_left(*place.exchange);
    place.exchange->connection_ = nullptr;
  }
  for (const Place& place : answers) {
    try {
      abort(*place.exchange);
    } catch (nb::python_error& error) {
      // The others are aborted all the same.
      error.discard_as_unraisable("aborting a request");
    }
    place.exchange->on_sent_ = nb::none();
  }
}

int Connection::traverse(visitproc visit, void* arg) const {
  idle_.traverse(visit, arg);
  for (const Place& place : answers_) Py_VISIT(place.object.ptr());
  Py_VISIT(current_.object.ptr());
  return visit_all({&owner_, &receive_,      &targets_object_, &origins_object_, &counts_object_,
                    &take_,  &refuse_asker_, &complete_,       &collect_,        &grow_,
                    &pack_,  &failure_,      &refuse_,         &changed_,        &charge_,
                    &write_, &write_lines_,  &check_unread_,   &memory_,         &collected_},
                   visit, arg);
}

// As `lose`, but without calls of what may be cleared itself.
void Connection::clear() {
  for (const Place& place : answers_) place.exchange->connection_ = nullptr;
  lost_ = stopped_ = closing_ = true;
  idle_.leave();
  const std::deque<Place> answers = std::move(answers_);
  answers_.clear();
  const Place message = drop_message();
  drop_all({&owner_, &take_, &refuse_asker_, &complete_, &collect_, &grow_, &pack_, &failure_,
            &refuse_, &changed_, &charge_, &write_, &write_lines_, &check_unread_});
}

bool Connection::close() {
  stopped_ = closing_ = true;
  idle_.leave();
  return unread_ || in_body();
}

// -- answers --------------------------------------------------------------------------------------

Connection::Place Connection::place(std::unique_ptr<const Head> head) {
  const bool close = last_ || head == nullptr || head->close;
  const std::uint64_t kept = kOfExchange + (head == nullptr ? 0 : head->memory());
  auto access = counts_->record(false, client);
  if (access != nullptr && head != nullptr && !head->chunked) access->received = head->length;
  nb::object object = nb::cast(Exchange(*this, std::move(head), close));
  answers_.push_back({object, nb::inst_ptr<Exchange>(object)});
  answers_.back().exchange->kept_ = kept;
  answers_.back().exchange->access_ = std::move(access);
  kept_ += kept;
  ++placed_;
  return answers_.back();
}

void Connection::flush() {
  while (!closing_ && !answers_.empty() && answers_.front().exchange->ready_) {
    const Place place = answers_.front();
    // What a client leaves unread while it asks for more takes memory.
    if (stalled_) call(check_unread_);
    if (closing_) break;
    Exchange& exchange = *place.exchange;
    exchange.ready_ = false;
    std::vector<nb::object> parts = std::move(exchange.parts_);
    exchange.parts_.clear();
    const bool finished = !exchange.unfinished_;
    if (finished) {
      answers_.pop_front();
      kept_ -= exchange.kept_;
      exchange.log();
      exchange.connection_ = nullptr;
      exchange.on_sent_ = nb::none();
    }
    write(std::move(parts));
    if (!finished) {
      if (!stalled_) exchange.report_sent();
    } else if (exchange.close_) {
      done_ = true;
      break;
    }
  }
  let_continue();
  report_changes();
}

void Connection::write(std::vector<nb::object> parts) {
  if (parts.size() == 1) {
    call(write_, parts[0]);
  } else if (!parts.empty()) {
    nb::list lines;
    for (nb::object& part : parts) lines.append(std::move(part));
    call(write_lines_, lines);
  }
}

void Connection::set_stalled(bool stalled) {
  if (lost_) return;
  stalled_ = stalled;
  report_changes();
  if (stalled || answers_.empty()) return;
  const Place place = answers_.front();
  if (place.exchange->unfinished_ && !place.exchange->ready_) place.exchange->report_sent();
}

void Connection::probe() {
  if (answers_.empty() || closing_) return;
  Exchange& exchange = *answers_.front().exchange;
  if (exchange.ready_ || exchange.probed_) return;
  exchange.probed_ = true;
  if (!exchange.answered_) {
    if (exchange.modern()) call(write_, bytes_object(kContinue));
  } else if (!exchange.bodiless() && !exchange.filler_.is_none()) {
    const auto filler = nb::cast<nb::bytes>(exchange.filler_);
    if (filler.size() != 0) call(write_, exchange.chunk({filler.c_str(), filler.size()}));
  }
}

// -- reports to the owner -------------------------------------------------------------------------

std::uint64_t Connection::kept() const {
  const std::uint64_t body = std::min<std::uint64_t>(framed_.value_or(0), kHeavy);
  return kept_ + rest_.size() + reader_.unfinished() + (collected_.is_none() ? 0 : body);
}

void Connection::charge_kept() {
  const auto due = charge.due(kept());
  // What is refused for lack of memory is refused once.
  if (!due || (*due > charge.charged && stopped_)) return;
  const nb::object call = charge_;
  charge.settle(*due, nb::cast<std::uint64_t>(call(*due)));
}

void Connection::report_changes() {
  if (lost_ || closing_) return;
  charge_kept();
  if (lost_ || closing_) return;
  const bool close = done_ || (last_ && answers_.empty() && !in_body());
  const bool reading = !stalled_;
  if (!answers_.empty() || !reader_.at_start() || !rest_.empty() || stopped_) {
    idle_.leave();
  } else {
    idle_.enter(owner_);
  }
  if (close || reading != reading_) {
    reading_ = reading;
    call(changed_, close);
  }
}

nb::tuple Connection::progress() const {
  if (stopped_ || !reading_) return nb::make_tuple(static_cast<int>(kNothing), 0, 0);
  // No time passes for a client that waits for us.
  if (in_body() && !waits_to_continue_) {
    const std::uint64_t nbytes = framed_.value_or(length_ - reader_.missing());
    return nb::make_tuple(static_cast<int>(kBody), placed_, nbytes);
  }
  const Stage stage = reader_.in_head() ? kHead : kNothing;
  return nb::make_tuple(static_cast<int>(stage), placed_, 0);
}

}  // namespace gpubridge::http1

namespace gpubridge {

void bind_http1_connection(nb::module_& module) {
  using http1::Connection;
  using http1::Exchange;
  nb::class_<IdleConnections>(module, "IdleConnections")
      .def(nb::init<>())
      .def("first", &IdleConnections::first)
      .def("__len__", &IdleConnections::size);
  nb::class_<RequestCounts>(module, "RequestCounts")
      .def(nb::init<std::size_t>())
      .def_rw("access_log", &RequestCounts::access_log, nb::arg().none())
      .def("rows", [](const RequestCounts& self) {
        nb::list rows;
        for (const RequestCounts::Row& row : self.rows()) {
          rows.append(nb::make_tuple(row.endpoint, row.status, row.count));
        }
        return rows;
      });
  nb::class_<http1::Origins>(module, "HttpOrigins")
      .def(nb::init<std::vector<std::string>, std::optional<std::vector<std::string>>>(),
           nb::arg("listed") = std::vector<std::string>(), nb::arg("names") = nb::none());
  nb::class_<Exchange>(module, "HttpExchange", nb::type_slots(called<Exchange>()))
      .def_prop_ro("method", &Exchange::method)
      .def_prop_ro("target", &Exchange::target)
      .def_prop_ro("length", &Exchange::length)
      .def_prop_ro("whole", &Exchange::whole)
      .def_prop_ro("coding", &Exchange::coding)
      .def_prop_ro("from_page", &Exchange::from_page)
      .def_prop_ro("lost", &Exchange::lost)
      .def_prop_ro("account", &Exchange::account)
      .def_rw("handler", &Exchange::handler)
      .def_prop_rw(
          "counters", [](const Exchange& self) { return self.counters; }, &Exchange::set_counters,
          nb::arg().none())
      .def_rw("endpoint", &Exchange::endpoint)
      .def_prop_ro("number", &Exchange::number)
      .def("log_failure", &Exchange::log_failure)
      .def("submitted", &Exchange::submitted)
      .def("field", &Exchange::field)
      .def("sole_field", &Exchange::sole_field)
      .def("fields", &Exchange::fields)
      .def("receive_into", &Exchange::receive_into)
      .def(
          "infer",
          [](Exchange& self, nb::object endpoint, nb::object slot,
             std::tuple<std::uint64_t, std::uint64_t, std::uint64_t> body, std::uint64_t copied,
             nb::handle origin) {
            const auto [start, length, header] = body;
            return self.infer(std::move(endpoint), std::move(slot), {start, length, header}, copied,
                              origin);
          },
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
      .def("respond", &Exchange::respond, nb::arg("status"), nb::arg("fields"), nb::arg("body"),
           nb::arg("buffers") = nb::tuple(), nb::kw_only(), nb::arg("plain") = false)
      .def("fail", &Exchange::fail, nb::arg("error"), nb::arg("status") = nb::none())
      .def("give_up", &Exchange::give_up)
      .def("begin", &Exchange::begin, nb::arg("status"), nb::arg("fields"), nb::arg("on_sent"),
           nb::arg("filler") = nb::bytes("", 0))
      .def("go_on", &Exchange::go_on)
      .def("send", &Exchange::send)
      .def("end", &Exchange::end);
  nb::class_<Connection>(module, "HttpConnectionState", nb::type_slots(collected<Connection>()))
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                    std::uint64_t>())
      .def("start", &Connection::start)
      .def("get_buffer", &Connection::get_buffer)
      .def("buffer_updated", &Connection::buffer_updated)
      .def("go_on", &Connection::go_on)
      .def("end", &Connection::end)
      .def("lose", &Connection::lose)
      .def("drain", &Connection::drain)
      .def("close", &Connection::close)
      .def("refuse", nb::overload_cast<nb::object, int>(&Connection::refuse))
      .def("probe", &Connection::probe)
      .def("progress", &Connection::progress)
      .def("set_stalled", &Connection::set_stalled)
      .def_prop_ro("in_body", &Connection::in_body)
      .def_prop_ro("stopped", &Connection::stopped)
      .def_prop_ro("has_pending", &Connection::has_pending)
      .def_prop_ro("reading", &Connection::reading)
      .def_prop_ro("open", &Connection::open)
      .def_prop_ro("kept", &Connection::kept)
      .def_prop_ro("placed", &Connection::placed)
      .def("set_client",
           [](Connection& self, std::string client) {
             self.client = std::make_shared<const std::string>(std::move(client));
           })
      .def_prop_rw(
          "charged", [](const Connection& self) { return self.charge.charged; },
          [](Connection& self, std::uint64_t nbytes) { self.charge.charged = nbytes; });
}

}  // namespace gpubridge
