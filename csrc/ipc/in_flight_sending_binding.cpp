// Sends requests to a stub: checks, lends memory, and writes records.

#include <poll.h>

#include "clock.h"
#include "ipc/in_flight_binding.h"

namespace gpubridge::at_stub {
namespace {

constexpr std::size_t kFrameBytes = 64UL * 1024;
constexpr std::size_t kFrameBatches = 6;
// No message waits for longer: about what the loop takes for as many requests as one carries.
constexpr std::int64_t kPatience = 100'000;

// The bytes of a context (gpubridge/transport/context.py), which keeps them.
nb::object encoded_context(nb::handle context) {
  nb::object kept = nb::steal(PyObject_GetAttr(context.ptr(), name_object<"_encoded">()));
  if (kept.is_valid()) return kept;
  PyErr_Clear();
  return attribute<"encoded">(context)();
}

// Calls `take` for a request, which is unsent if that throws; returns whether it has not.
template <typename Take>
bool contain(nb::handle request, std::vector<RequestsAtStub::Unsent>& unsent, Take&& take) {
  try {
    take();
    return true;
  } catch (const nb::python_error& error) {
    unsent.push_back({nb::borrow(request), nb::borrow(error.value())});
  } catch (const std::exception& error) {
    unsent.push_back({nb::borrow(request), nb::handle(PyExc_RuntimeError)(error.what())});
  }
  return false;
}

}  // namespace

bool has_bytes(nb::handle ranges) {
  return any_range(ranges, [](const RangeView& range) { return range.nbytes != 0; });
}

// Memory lent for a request.
Held held_for(InferRequest& request) {
  Held held;
  held.request = nb::borrow(request.object());
  if (request.has(InferRequest::kSlot)) held.slot = nb::borrow(request.get(InferRequest::kSlot));
  held.traced = request.has(InferRequest::kTrace);
  held.size = static_cast<std::uint64_t>(request.batch_size);
  held.arrived = request.arrived;
  held.in_slot = !request.has(InferRequest::kRanges);
  held.of_client = request.has(InferRequest::kClient);
  const nb::handle ranges = request.get(InferRequest::kRanges);
  if (!held.in_slot && has_bytes(ranges)) held.kept = nb::borrow(ranges);
  return held;
}

std::vector<RequestsAtStub::Unsent> RequestsAtStub::submit(nb::handle requests) {
  // Where one request follows the other, the next one does not come before the answer.
  const bool alone = core_.idle() && hooks_ && (alone_ || turn().is_quiet());
  // A crowd that goes on is nothing new.
  if (busy_poll_ != nullptr && (alone || !together_)) {
    alone_ = busy_poll_->sent(alone);
    together_ = !alone;
  }
  std::vector<Unsent> unsent;
  const bool full = enter(requests, unsent);
  note_work();
  if (alone || full) {
    flush();
  } else if (!flush_due_) {
    flush_due_ = true;
    turn().add(nb::find(this));
  }
  return unsent;
}

void RequestsAtStub::note_work() {
  if (working_ == core_.idle()) {
    working_ = !working_;
    turn().working(working_);
  }
}

void RequestsAtStub::flush() {
  flush_due_ = false;
  if (frame_.batches() == 0) return;
  const std::string message = frame_.take(alone_);
  const bool direct = !blocked_ && message.size() <= kDatagramLimit;
  if (!hooks_ || (direct && send_datagram(descriptor_, message))) return;
  hooks_->send(bytes_object(message));
}

void RequestsAtStub::cancel(nb::handle request, bool running_only, std::uint8_t how) {
  const auto ticket = infer_request(request).ticket;
  if (!is_at_stub(ticket)) return;
  const auto batch = core_.cancel(static_cast<Ticket>(ticket), running_only,
                                  static_cast<InFlightRequests::Cancelled>(how));
  if (batch) nb::object(hooks_->cancelled)(ticket, *batch);
}

// Writes a batch, without the requests that cannot be written; returns whether its message should
// not grow any more.
bool RequestsAtStub::enter(nb::handle requests, std::vector<Unsent>& unsent) {
  if (!buffers_ || nb::len(requests) > free_tickets()) {
    throw nb::value_error("the stub has no ticket left for a request");
  }
  std::vector<InFlightRequests::Entering> entering;
  std::vector<Held> lent;
  for (nb::handle object : requests) {
    contain(object, unsent, [&] {
      InferRequest& request = infer_request(object);
      Held held = held_for(request);
      // The stub says that it is done with what it was lent, if it looks at something.
      const bool has_memory =
          held.in_slot ? held.slot.is_valid() && nb::len(request.get(InferRequest::kPlaces)) != 0
                       : held.kept.is_valid();
      entering.push_back({has_memory, static_cast<std::uint32_t>(request.unsent)});
      lent.push_back(std::move(held));
    });
  }
  if (lent.empty()) return false;
  const nb::object self = nb::find(this);
  const std::uint64_t sequence = ++sequence_;
  const std::span<const Ticket> tickets = core_.enter(sequence, entering);
  for (std::size_t index = 0; index < lent.size(); ++index) {
    InferRequest& request = infer_request(lent[index].request);
    hold(tickets[index]) = std::move(lent[index]);
    request.ticket = tickets[index];
    request.set(InferRequest::kInstance, self);
  }
  std::string records;
  nb::list pieces;
  std::vector<Ticket> unwritten;
  for (const Ticket ticket : tickets) {
    const nb::object object = held_[ticket].request;
    const std::size_t begin = records.size();
    const bool written = contain(object, unsent, [&] {
      write(infer_request(object), records);
      const nb::object text = long_parameters(infer_request(object));
      if (text.is_none()) return;
      const std::string_view all(records);
      nb::object before = bytes_object(all.substr(0, begin));
      nb::object piece = nb::make_tuple(bytes_object(all.substr(begin)), text);
      pieces.append(std::move(before));
      pieces.append(std::move(piece));
      records.clear();
    });
    if (written) continue;
    records.resize(begin);
    unwritten.push_back(ticket);
  }
  for (const Ticket ticket : unwritten) take_back_unsent(sequence, ticket);
  const std::size_t count = nb::len(requests) - unsent.size();
  if (count == 0) return false;
  if (nb::len(pieces) != 0) {
    flush();
    ExecuteFrame alone;
    alone.add(sequence, count, {});
    pieces.insert(0, bytes_object(alone.take(alone_)));
    pieces.append(bytes_object(records));
    hooks_->send_long(pieces);
    return false;
  }
  frame_.add(sequence, count, records);
  return frame_.batches() >= kFrameBatches || frame_.size() > kFrameBytes;
}

// The stub never hears of the request: it is its sender's again, with its memory.
void RequestsAtStub::take_back_unsent(std::uint64_t sequence, Ticket ticket) {
  core_.leave_unsent(sequence, ticket);
  const Held held = std::exchange(held_[ticket], {});
  InferRequest& request = infer_request(held.request);
  request.ticket = kAnswered;
  request.take(InferRequest::kInstance);
}

// The parameters of a request that are not in its encoded context; None for others.
nb::object RequestsAtStub::long_parameters(const InferRequest& request) const {
  const nb::handle context = request.get(InferRequest::kContext);
  if (context.is(hooks_->no_context)) return nb::none();
  nb::object parameters = attribute<"parameters">(context);
  return PyMemoryView_Check(parameters.ptr()) ? parameters : nb::none();
}

void RequestsAtStub::write(InferRequest& request, std::string& records) {
  const InferRequest& source = request.has(InferRequest::kPattern)
                                   ? infer_request(request.get(InferRequest::kPattern))
                                   : request;
  RecordParts parts;
  parts.ticket = static_cast<Ticket>(request.ticket);
  parts.signature = view_of_bytes(request.get(InferRequest::kSignature));
  parts.dims = view_of_bytes(request.get(InferRequest::kDims));
  parts.identifier = view_of_text(request.get(InferRequest::kIdentifier));
  const nb::handle context = request.get(InferRequest::kContext);
  const bool in_ranges = source.has(InferRequest::kRanges);
  nb::object encoded;
  // Of what is on a device or the client's own, the stub needs more fields.
  if (in_ranges && (request.has(InferRequest::kClient) || !on_kept_.is_none())) {
    encoded = hooks_->context(request.object());
  } else if (!context.is(hooks_->no_context)) {
    encoded = encoded_context(context);
  }
  if (encoded.is_valid()) parts.context = view_of_bytes(encoded);
  if (!in_ranges) {
    write_slot(source, parts, records);
    return;
  }
  const nb::handle ranges = source.get(InferRequest::kRanges);
  const bool shared = nb::cast<bool>(attribute<"shared">(context));
  parts.tensors = static_cast<std::uint32_t>(nb::len(ranges));
  char* at = parts.append_to(records);
  hooks_->names.write(at, ranges, static_cast<Ticket>(source.ticket), shared);
}

void RequestsAtStub::write_slot(const InferRequest& source, RecordParts& parts,
                                std::string& records) {
  if (!source.has(InferRequest::kSlot)) {
    parts.append_to(records);
    return;
  }
  const nb::handle slot = source.get(InferRequest::kSlot);
  const std::uint64_t region = hooks_->names.of(attribute<"segment">(slot), false);
  const nb::handle places = source.get(InferRequest::kPlaces);
  const auto base =
      nb::cast<std::uint64_t>(attribute<"offset">(slot)) + static_cast<std::uint64_t>(source.start);
  const auto lease = static_cast<Ticket>(source.ticket);
  parts.tensors = static_cast<std::uint32_t>(nb::len(places));
  char* at = parts.append_to(records);
  for (nb::handle place : places) {
    const auto offset = nb::cast<std::int64_t>(place[0]);
    at = write_ref(at, {region, base + static_cast<std::uint64_t>(offset),
                        nb::cast<std::uint64_t>(place[1]), lease});
  }
}

// -- turns of the event loop ----------------------------------------------------------------------

bool SendTurn::has_events() const {
  pollfd looked{events_, POLLIN, 0};
  return events_ >= 0 && poll(&looked, 1, 0) > 0;
}

void SendTurn::add(nb::object stub) {
  due_.push_back(std::move(stub));
  if (due_.size() > 1) return;
  since_ = monotonic_ns();
  call_at_end();
}

void SendTurn::end() {
  if (monotonic_ns() - since_ < kPatience && has_events()) {
    call_at_end();
    return;
  }
  for (const nb::object& stub : std::exchange(due_, {})) {
    try {
      nb::cast<RequestsAtStub&>(stub).flush();
    } catch (nb::python_error& error) {
      // The others are sent all the same.
      error.discard_as_unraisable("sending requests to a stub");
    }
  }
}

}  // namespace gpubridge::at_stub
