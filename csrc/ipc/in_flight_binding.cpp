#include "ipc/in_flight_binding.h"

#include <cerrno>
#include <sstream>

#include "ipc/context.h"

namespace gpubridge {
namespace at_stub {
namespace {

// Kinds of messages, as gpubridge/transport/messages.py numbers them.
constexpr char kResults = 18;
constexpr char kResponses = 21;
// Answers that are looked at for each new one: they end nearly in order.
constexpr std::size_t kLooks = 4;

// Keeps a MemoryRange where it is. The memoryview of its own keeps the segment's free to be
// released.
struct KeptRange {
  KeptRange(nb::object range, nb::handle memory)
      : range(std::move(range)),
        view(checked(PyMemoryView_FromObject(memory.ptr()))),
        bytes(view, PyBUF_SIMPLE) {}

  nb::object range;
  nb::object view;
  BufferView bytes;
};

// True if a context says only that outputs stayed in the memory of their request.
bool says_passed_on(std::string_view context) {
  static const std::string said = [] {
    Context made;
    made.set_flag(ContextField::kPassedOn);
    return made.encoded();
  }();
  return context == said;
}

// Instead of the reason for which a request failed.
constexpr const char* kStillOpen = "open";
constexpr const char* kComesBack = "comes back";

}  // namespace

// -- answers -------------------------------------------------------------------------------------

// Calls `take`; returns what stopped it: an exception, or the text of one that a stub is to blame
// for. None for nothing.
template <typename Take>
nb::object stopped(Take&& take) {
  try {
    take();
  } catch (const std::invalid_argument& error) {
    // Of a message, a record, or its context.
    return nb::str(error.what());
  } catch (nb::python_error& error) {
    return nb::borrow(error.value());
  }
  return nb::none();
}

// Says of which message it is that the length or the count of something is wrong.
template <typename Decode>
auto named_errors(const std::string& message, Decode&& decode) {
  try {
    return decode();
  } catch (const MalformedRecord& error) {
    throw MalformedRecord(message + error.what());
  }
}

RequestsAtStub::Received RequestsAtStub::receive() {
  if (!hooks_) return Received::kNothing;
  const Datagram datagram = receive_now(descriptor_, received_);
  if (datagram.count < 0) return errno == EAGAIN ? Received::kNothing : Received::kClosed;
  const std::string_view message(received_.data(), static_cast<std::size_t>(datagram.count));
  const bool plain = !datagram.cut && datagram.descriptors.empty() && !message.empty();
  if (plain && (message[0] == kResults || message[0] == kResponses)) {
    take(message, 0);
    return Received::kMessage;
  }
  const nb::object receive = hooks_->receive;
  const bool more =
      nb::cast<bool>(receive(bytes_object(message), descriptors_of(datagram), datagram.cut));
  return more ? Received::kMessage : Received::kClosed;
}

// Nothing looks at the message any more when Python is called for what came of it.
void RequestsAtStub::take(std::string_view message, Duration now) {
  if (!hooks_) return;
  if (now == 0) now = static_cast<Duration>(monotonic_ns());
  Taken taken;
  const bool results = !message.empty() && message[0] == kResults;
  const nb::object error =
      stopped([&] { results ? complete(message, now, taken) : respond(message, now, taken); });
  counters().copied(taken.copied);
  tell(taken, now, error);
}

void RequestsAtStub::take_gathered(std::string_view message) {
  bool new_ones = false;
  try {
    for (const ResultBatch& batch : decode_results(message)) {
      new_ones = new_ones || core_.holds(batch.sequence);
    }
  } catch (const std::invalid_argument&) {
    // There is no listener to report it to.
    return;
  }
  if (new_ones) take(message, 0);
}

// Tells the requests and their model; what one of them raises keeps nothing from the others.
void RequestsAtStub::tell(const Taken& taken, Duration now, const nb::object& error) {
  std::optional<nb::python_error> raised;
  const auto run = [&raised](auto&& function) {
    try {
      function();
    } catch (nb::python_error& thrown) {
      if (!raised) raised.emplace(thrown);
    }
  };
  note_work();
  const nb::object feed = hooks_->feed;
  const nb::object failed = hooks_->failed;
  const nb::object counters = hooks_->counters;
  for (const Outcome& each : taken.outcomes) {
    InferRequest& request = infer_request(each.request);
    const bool told = each.outcome.is_valid();
    if (told && each.last) run([&] { request.finish(each.outcome); });
    if (told && !each.last) run([&] { request.respond(each.outcome, store_); });
    if (each.observed) run([&] { note_answer(each, nb::cast<ModelCounters&>(counters)); });
  }
  if (taken.answered.batches != 0 || taken.closed) {
    run([&] {
      nb::cast<InstanceFeed&>(feed).answered(taken.answered, static_cast<Nanoseconds>(now));
    });
  }
  const bool is_idle = taken.answered.batches != 0 && core_.idle();
  if (is_idle && busy_poll_ != nullptr) run([&] { busy_poll_->answered(); });
  if (!error.is_none()) run([&] { failed(error); });
  if (raised) throw nb::python_error(*raised);
}

void RequestsAtStub::complete(std::string_view message, Duration now, Taken& taken) {
  auto decoded = named_errors("RESULTS message: ", [&] { return decode_results(message); });
  for (ResultBatch& batch : decoded) complete_batch(batch, now, taken);
}

// A batch changes nothing until all of it is understood.
void RequestsAtStub::complete_batch(ResultBatch& batch, Duration now, Taken& taken) {
  if (core_.end_withdrawn(batch.sequence)) {
    // Its places are free for others.
    taken.closed = true;
    return;
  }
  core_.check(batch);
  std::vector<Ending> endings;
  for (const RecordView& record : batch.records) {
    const std::uint32_t flags = record.word();
    Ending ending{record.ticket(), flags, {}};
    if ((flags & (kResponseOpen | kResponseRescheduled)) == 0) {
      ending.decoded = decode(record, held_[ending.ticket]);
    }
    endings.push_back(std::move(ending));
  }
  std::vector<nb::object> requests;
  bool traced = false;
  Duration arrived = 0;
  for (const Ticket ticket : core_.end_batch(batch.sequence)) {
    arrived = std::max(arrived, held_[ticket].arrived);
    traced = traced || held_[ticket].traced;
    requests.push_back(held_[ticket].request);
  }
  batch.bound_times(arrived, now);
  std::vector<Run> runs;
  for (const Ending& ending : endings) {
    const Held& held = held_[ending.ticket];
    Run run{ending.ticket, held.size, held.arrived, {}, kNoOutcome};
    const std::size_t before = taken.outcomes.size();
    if (const nb::object reason = end(ending, taken); !reason.is_none()) {
      run.reason = view_of_text(reason);
    }
    if (taken.outcomes.size() > before) run.outcome = before;
    runs.push_back(std::move(run));
  }
  count(batch, now, runs, taken);
  taken.answered.batches += 1;
  taken.answered.requests += runs.size();
  taken.answered.execute_ns += batch.ended - batch.started;
  taken.copied += batch.copied;
  if (!traced) return;
  nb::list members;
  for (nb::object& request : requests) members.append(std::move(request));
  taken.answered.traced.push_back(named_tuple(hooks_->batch, batch.sequence, batch.started,
                                              batch.called, batch.ended, std::move(members)));
}

nb::object RequestsAtStub::end(const Ending& ending, Taken& taken) {
  using Step = InFlightRequests::Step;
  Held& held = held_[ending.ticket];
  const nb::object request = held.request;
  nb::object reason = nb::none();
  switch (core_.end_in_batch(ending.ticket, ending.flags)) {
    case Step::kOpen:
      return nb::str(kStillOpen);
    case Step::kWasEarly: {
      const std::string early = std::exchange(held.early_reason, {});
      if (early.empty()) {
        taken.outcomes.push_back({request, {}});
      } else {
        reason = nb::str(early.c_str());
      }
      release_memory(ending.ticket);
      break;
    }
    case Step::kComesBack:
      // No client waits for the requests that pad a batch.
      if (held.size != 0) taken.answered.returning.push_back(request);
      release(ending.ticket);
      infer_request(request).ticket = kAnswered;
      infer_request(request).take(InferRequest::kInstance);
      return nb::str(kComesBack);
    case Step::kEnded:
      reason = ending.decoded.reason;
      leave(ending.ticket, infer_request(request));
      taken.outcomes.push_back({request, ending.decoded.outcome});
  }
  return reason;
}

FailureReason failure_reason(std::string_view reason) {
  return reason == "CANCELED" ? FailureReason::kCanceled : FailureReason::kBackend;
}

void RequestsAtStub::count(const ResultBatch& batch, Duration now, const std::vector<Run>& runs,
                           Taken& taken) {
  ModelCounters& counters = this->counters();
  const Steps steps{batch.called - batch.started, batch.ended - batch.called, now - batch.ended};
  RequestSums sums;
  std::uint64_t size = 0;
  std::uint64_t others = 0;
  for (const Run& run : runs) {
    if (run.size == 0) continue;
    const Duration spent = now - run.arrived;
    const Duration queued = batch.started - run.arrived;
    // A run that the model wants repeated counts like any other.
    if (run.reason == kStillOpen) {
      others += run.size;
      held_[run.ticket].queued = queued;
      held_[run.ticket].steps = steps;
    } else if (!run.reason.empty() && run.reason != kComesBack) {
      counters.failed(failure_reason(run.reason), spent);
      if (run.reason != "CANCELED") others += run.size;  // else the model did not get it
    } else {
      sums = {sums.done + 1, sums.spent + spent, sums.queued + queued};
      size += run.size;
      const Observation observed{now, spent, queued, steps};
      counters.observe(observed);
      if (run.reason == kComesBack) counters.passed_on(observed, 0);
      if (run.outcome != kNoOutcome) taken.outcomes[run.outcome].observed = observed;
    }
  }
  if (sums.done != 0) ++succeeded_;
  if (size + others == 0) return;
  counters.executed(1, size, sums, steps, others);
  counters.last_ended = batch.ended;
}

// The bytes of a record's tensors; none where one does not exist.
nb::object RequestsAtStub::buffers(const RecordView& record) const {
  auto& book = nb::cast<LeaseBook&>(hooks_->book);
  std::vector<TensorRef> places;
  places.reserve(record.tensors());
  for (std::size_t index = 0; index < record.tensors(); ++index) {
    places.push_back(record.ref(index));
    if (!book.exists(places.back())) return {};
  }
  return LentBuffers::make(book.spans(places));
}

// A response without anything out of the ordinary is made here; Python sees to all others, and
// words what is wrong with one.
Decoded RequestsAtStub::decode(const RecordView& record, const Held& held) {
  if (nb::object response = plain_response(record, held); response.is_valid()) {
    return {std::move(response), nb::none()};
  }
  auto& reader = nb::cast<RecordReader&>(reader_);
  const nb::object made = hooks_->decode(reader.record(record), held.request);
  return {made[0], made[1]};
}

nb::object RequestsAtStub::plain_response(const RecordView& record, const Held& held) {
  const bool stayed = says_passed_on(record.context());
  if (held.of_client || !on_kept_.is_none() || (record.word() & ~kResponseOpen) != 0 ||
      !(stayed || record.context().empty())) {
    return {};
  }
  const RecordForm& form = nb::cast<RecordReader&>(reader_).form(record);
  if (!record.sizes_fit(form.kinds)) return {};
  const nb::object signature = form.signature;
  const nb::object shapes = form.shapes;
  if (stayed) return response_in_slot(record, signature, shapes);
  nb::object buffers = this->buffers(record);
  if (!buffers.is_valid()) return {};
  nb::object response =
      make_infer_response(hooks_->response, signature, shapes, std::move(buffers));
  infer_response(response).set(InferResponse::kMemory, hooks_->memory);
  infer_response(response).set(InferResponse::kRefs, RecordReader::refs(record));
  return response;
}

nb::object RequestsAtStub::response_in_slot(const RecordView& record, nb::handle signature,
                                            nb::handle shapes) {
  std::vector<LentSpan> spans;
  nb::list parts;
  for (std::size_t index = 0; index < record.tensors(); ++index) {
    const TensorRef ref = record.ref(index);
    if (ref.lease != record.ticket() || ref.region >> 32U != 0 || ref.nbytes == 0) return {};
    const nb::object part = find(ref).object();
    const auto kept = std::make_shared<const KeptRange>(part, attribute<"view">(part[0]));
    spans.push_back({kept, static_cast<char*>(kept->bytes.data()) + ref.offset,
                     static_cast<std::size_t>(ref.nbytes)});
    parts.append(part);
  }
  nb::object response =
      make_infer_response(hooks_->placed, signature, shapes, LentBuffers::make(std::move(spans)));
  set_attribute<"parts">(response, parts);
  set_attribute<"shared">(response, nb::frozenset());
  return response;
}

void RequestsAtStub::respond(std::string_view message, Duration now, Taken& taken) {
  const auto decoded =
      named_errors("RESPONSES message: ", [&] { return decode_responses(message); });
  taken.copied = decoded.copied;
  for (const RecordView& record : decoded.records) {
    core_.receive_response(record.ticket());
    const Held& held = held_[record.ticket()];
    const nb::object request = held.request;
    Decoded made{nb::none(), nb::none()};
    if ((record.word() & kResponseEmpty) == 0) made = decode(record, held);
    const bool last = (record.word() & kResponseOpen) == 0;
    std::optional<Observation> observed;
    if (last) observed = end_response(record.ticket(), made.reason, now, taken);
    if (last || !made.outcome.is_none()) {
      taken.outcomes.push_back({request, std::move(made.outcome), last, observed});
    }
  }
}

std::optional<Observation> RequestsAtStub::end_response(Ticket ticket, const nb::object& reason,
                                                        Duration now, Taken& taken) {
  const nb::object request = held_[ticket].request;
  const std::string why(reason.is_none() ? std::string_view() : view_of_text(reason));
  if (core_.end_response(ticket)) {
    const std::optional<Observation> observed = count_closed(held_[ticket], why, now);
    leave(ticket, infer_request(request));
    taken.closed = true;
    return observed;
  }
  held_[ticket].early_reason = why;
  infer_request(request).ticket = kAnswered;
  forget_memory(infer_request(request));
  return {};
}

std::optional<Observation> RequestsAtStub::count_closed(const Held& held, std::string_view reason,
                                                        Duration now) {
  if (held.size == 0) return {};
  if (!reason.empty()) {
    counters().failed(failure_reason(reason), now - held.arrived);
    return {};
  }
  ++succeeded_;
  const Observation observed = ended_later(now, held.arrived, held.queued, held.steps);
  counters().answered(held.size, observed);
  return observed;
}

// -- memory --------------------------------------------------------------------------------------

void RequestsAtStub::leave(Ticket ticket, InferRequest& request) {
  request.ticket = kAnswered;
  forget_memory(request);
  release_memory(ticket);
}

void RequestsAtStub::forget_memory(InferRequest& request) {
  request.take(InferRequest::kSlot);
  request.take(InferRequest::kRanges);
  request.take(InferRequest::kClient);
}

void RequestsAtStub::release_memory(Ticket ticket) {
  held_[ticket].request.reset();
  if (core_.release_unused(ticket)) {
    take_back(ticket);
  } else if (!on_kept_.is_none()) {
    on_kept_(kept(ticket));
  }
}

// Returns a request that is executed again, with its memory. What was handed on meanwhile stays
// that of all who hold it.
nb::object RequestsAtStub::release(Ticket ticket) {
  const Held held = std::exchange(held_[ticket], {});
  if (!held.shared) return held.request;
  InferRequest& request = infer_request(held.request);
  const nb::object slot = held.kept[0];
  const RangeView view(slot);
  nb::list ranges;
  for (nb::handle place : request.get(InferRequest::kPlaces)) {
    const auto at = static_cast<std::uint64_t>(request.start + nb::cast<std::int64_t>(place[0]));
    const auto nbytes = nb::cast<std::uint64_t>(place[1]);
    ranges.append(nbytes == 0 ? empty_range()
                              : make_range(view.segment, view.offset + at, nbytes, slot[3]));
  }
  request.take(InferRequest::kSlot);
  request.set(InferRequest::kRanges, ranges);
  return held.request;
}

bool RequestsAtStub::release_kept() {
  std::vector<Ticket> released = core_.release_kept();
  for (const Ticket ticket : core_.release_answers(core_.answers())) released.push_back(ticket);
  for (const Ticket ticket : released) {
    const nb::object ranges = kept(ticket);
    take_back(ticket);
    if (!on_ended_.is_none()) on_ended_(ranges);
  }
  return core_.kept() + core_.answers() != 0;
}

nb::object RequestsAtStub::lend(nb::object ranges) {
  for (const Ticket ticket : core_.release_answers(kLooks)) {
    const nb::object before = kept(ticket);
    take_back(ticket);
    if (!on_ended_.is_none()) on_ended_(before);
  }
  if (!buffers_ || core_.free_tickets() == 0) return nb::none();
  if (!has_bytes(ranges)) return nb::int_(kNoLease);
  const Ticket ticket = core_.lend_answer();
  hold(ticket).kept = std::move(ranges);
  if (!on_kept_.is_none()) on_kept_(held_[ticket].kept);
  return nb::int_(ticket);
}

RangeItem RequestsAtStub::find(const TensorRef& ref) {
  if (ref.nbytes == 0) return {};
  if (ref.lease < held_.size()) {
    Held& held = held_[ref.lease];
    if (!held.kept.is_valid() && held.slot.is_valid()) {
      // From now on several hold it.
      const nb::object slot = std::exchange(held.slot, {});
      nb::list only;
      only.append(
          make_range(attribute<"segment">(slot), nb::cast<std::uint64_t>(attribute<"offset">(slot)),
                     nb::cast<std::uint64_t>(attribute<"size">(slot)), hooks_->share(slot)));
      held.kept = std::move(only);
      held.shared = true;
    }
    RangeItem found;
    const auto covers = [&](const RangeView& view) {
      if (view.segment.is_none() || ref.offset < view.offset || ref.nbytes > view.nbytes ||
          ref.offset - view.offset > view.nbytes - ref.nbytes ||
          number_of(attribute<"region">(view.segment)) != ref.region) {
        return false;
      }
      found = {nb::borrow(view.segment), ref.offset, ref.nbytes, nb::borrow(view.keep)};
      return true;
    };
    if (held.kept.is_valid() && any_range(held.kept, covers)) return found;
  }
  std::ostringstream text;
  text << ref.nbytes << " bytes at " << ref.offset << " of region 0x" << std::hex << ref.region
       << std::dec << " are not lent under ticket " << ref.lease;
  throw MalformedRecord(text.str());
}

nb::object RequestsAtStub::ranges(std::span<const TensorRef> refs) {
  if (!hooks_) throw MalformedRecord("a call of a stub that is gone");
  auto& book = nb::cast<LeaseBook&>(hooks_->book);
  StubRanges places(hooks_->memory);
  std::vector<RangeItem> ranges;
  ranges.reserve(refs.size());
  for (TensorRef ref : refs) {
    ref.region &= ~kReadOnlyRegion;
    if (ref.region >> 32U != hooks_->owner) {
      ranges.push_back(find(ref));
      continue;
    }
    if (!book.exists(ref)) throw MalformedRecord("a tensor in memory that does not exist");
    ranges.push_back(places.of(ref, LentBuffers::make(book.spans({&ref, 1}))));
  }
  return MemoryRanges::make(std::move(ranges));
}

nb::list RequestsAtStub::all_kept() const {
  nb::list all;
  for (const Held& held : held_) {
    if (held.kept.is_valid()) all.append(held.kept);
  }
  return all;
}

nb::list RequestsAtStub::withdraw() {
  nb::list requests;
  if (!buffers_ || !claims()) return requests;
  for (const Ticket ticket : core_.withdraw()) requests.append(release(ticket));
  note_work();
  return requests;
}

nb::list RequestsAtStub::left() const {
  nb::list left;
  for (const auto& [sequence, ticket] : core_.members()) {
    left.append(nb::make_tuple(sequence, ticket, held_[ticket].request));
  }
  return left;
}

nb::tuple RequestsAtStub::close(std::uint64_t started_last) {
  using Left = InFlightRequests::Left;
  nb::list started;
  nb::list unstarted;
  for (const auto& [ticket, left] : core_.close(started_last)) {
    if (left == Left::kUnstarted) {
      unstarted.append(release(ticket));
      continue;
    }
    const nb::object request = held_[ticket].request;
    take_back(ticket);
    if (left != Left::kEnded) {
      forget_memory(infer_request(request));
      started.append(request);
    }
  }
  note_work();
  hooks_.reset();
  poll_with(nb::none());
  on_kept_ = on_ended_ = store_ = nb::none();
  buffers_.reset();
  return nb::make_tuple(std::move(started), std::move(unstarted));
}

}  // namespace at_stub

void bind_in_flight(nb::module_& module) {
  using at_stub::RequestsAtStub;
  nb::class_<at_stub::SendTurn>(module, "SendTurn")
      .def(nb::init<nb::object, int, std::size_t>())
      .def("end", &at_stub::SendTurn::end);
  nb::class_<RequestsAtStub>(module, "InFlightRequests")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::object, nb::handle, int>())
      .def_prop_ro("free_tickets", &RequestsAtStub::free_tickets)
      .def_prop_ro("open_requests", &RequestsAtStub::open_requests)
      .def_prop_ro("oldest", &RequestsAtStub::oldest)
      .def_prop_ro("succeeded", &RequestsAtStub::succeeded)
      .def("holds", &RequestsAtStub::holds)
      .def("has_started", &RequestsAtStub::has_started)
      .def("executes", &RequestsAtStub::executes)
      .def("watch", &RequestsAtStub::watch, nb::arg().none(), nb::arg().none())
      .def("poll_with", &RequestsAtStub::poll_with, nb::arg().none())
      .def("store_with", &RequestsAtStub::store_with)
      .def("block", &RequestsAtStub::block)
      .def("flush", &RequestsAtStub::flush)
      .def("cancel", &RequestsAtStub::cancel, nb::arg(), nb::arg() = false, nb::arg() = 1)
      .def("passed_on", &RequestsAtStub::passed_on)
      .def("receive",
           [](RequestsAtStub& self) -> nb::object {
             const auto received = self.receive();
             if (received == RequestsAtStub::Received::kClosed) return nb::none();
             return nb::bool_(received == RequestsAtStub::Received::kMessage);
           })
      .def("on_readable", &RequestsAtStub::on_readable)
      .def(
          "take",
          [](RequestsAtStub& self, const nb::bytes& message, Duration now) {
            self.take({message.c_str(), message.size()}, now);
          },
          nb::arg(), nb::arg() = 0)
      .def("take_gathered",
           [](RequestsAtStub& self, const nb::bytes& message) {
             self.take_gathered({message.c_str(), message.size()});
           })
      .def("release_kept", &RequestsAtStub::release_kept)
      .def("lend", &RequestsAtStub::lend)
      .def_prop_ro("lent_answers", &RequestsAtStub::lent_answers)
      .def_prop_ro("kept_requests", &RequestsAtStub::kept_requests)
      .def("find", [](RequestsAtStub& own, nb::handle at) { return own.find(ref_at(at)).object(); })
      .def("all_kept", &RequestsAtStub::all_kept)
      .def("left", &RequestsAtStub::left)
      .def("close", &RequestsAtStub::close);
}

}  // namespace gpubridge
