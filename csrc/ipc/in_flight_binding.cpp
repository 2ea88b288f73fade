#include "ipc/in_flight_binding.h"

#include <nanobind/stl/optional.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ipc/ipc_bindings.h"

namespace gpubridge {
namespace at_stub {
namespace {

constexpr std::uint32_t kNoLease = 0xFFFFFFFFU;
// Answers that are looked at for each new one: they end nearly in order.
constexpr std::size_t kLooks = 4;

// Instead of the reason for which a request failed.
constexpr const char* kStillOpen = "open";
constexpr const char* kComesBack = "comes back";

}  // namespace

// -- answers -------------------------------------------------------------------------------------

// Calls `take`; returns what stopped it: an exception, or the text of one that a stub is to blame
// for. None for nothing.
template <typename Take>
nb::object stopped(Take&& take, const char* what) {
  try {
    take();
  } catch (const std::invalid_argument& error) {
    // Of a record, or of its context.
    const std::string text = std::string(what) + error.what();
    return nb::str(text.data(), text.size());
  } catch (nb::python_error& error) {
    return nb::borrow(error.value());
  }
  return nb::none();
}

nb::object RequestsAtStub::complete(const nb::bytes& message, Duration now) {
  Completed completed;
  std::vector<ResultBatch> decoded;
  nb::object error = stopped([&] { decoded = decode_results({message.c_str(), message.size()}); },
                             "RESULTS message: ");
  if (error.is_none()) {
    error = stopped(
        [&] {
          for (const ResultBatch& batch : decoded) complete_batch(batch, now, completed);
        },
        "");
  }
  counters().copied(completed.copied);
  return named(hooks_->completed,
               nb::make_tuple(std::move(completed.outcomes), std::move(completed.returning),
                              std::move(completed.traced), completed.batches, completed.requests,
                              completed.execute, std::move(error)));
}

// A batch changes nothing until all of it is understood.
void RequestsAtStub::complete_batch(const ResultBatch& batch, Duration now, Completed& completed) {
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
  nb::list requests;
  bool traced = false;
  for (const Ticket ticket : core_.end_batch(batch.sequence)) {
    traced = traced || held_[ticket].traced;
    requests.append(held_[ticket].request);
  }
  std::vector<Run> runs;
  for (const Ending& ending : endings) {
    const Held& held = held_[ending.ticket];
    Run run{ending.ticket, held.size, held.arrived, {}};
    if (const nb::object reason = end(ending, completed); !reason.is_none()) {
      run.reason = text_of(reason);
    }
    runs.push_back(std::move(run));
  }
  count(batch, now, runs);
  completed.batches += 1;
  completed.requests += runs.size();
  completed.execute += batch.ended - batch.started;
  completed.copied += batch.copied;
  if (!traced) return;
  completed.traced.append(
      named(hooks_->batch, nb::make_tuple(batch.sequence, batch.started, batch.called, batch.ended,
                                          std::move(requests))));
}

nb::object RequestsAtStub::end(const Ending& ending, Completed& completed) {
  using Step = InFlightRequests::Step;
  Held& held = held_[ending.ticket];
  const nb::object request = held.request;
  nb::object reason = nb::none();
  switch (core_.end_in_batch(ending.ticket, ending.flags)) {
    case Step::kOpen:
      return nb::str(kStillOpen);
    case Step::kWasEarly: {
      const std::string early = std::exchange(held.early_reason, {});
      if (!early.empty()) reason = nb::str(early.c_str());
      settle(ending.ticket);
      break;
    }
    case Step::kComesBack:
      // Nobody asked for what fills up a batch, whatever the model wants.
      if (held.size != 0) completed.returning.append(request);
      held = {};
      infer_request(request).ticket = kAnswered;
      infer_request(request).take(InferRequest::kInstance);
      return nb::str(kComesBack);
    case Step::kOver:
      reason = ending.decoded.reason;
      leave(ending.ticket, infer_request(request));
      completed.outcomes.append(nb::make_tuple(request, ending.decoded.outcome));
  }
  return reason;
}

FailureReason failure_reason(std::string_view reason) {
  return reason == "CANCELED" ? FailureReason::kCanceled : FailureReason::kBackend;
}

void RequestsAtStub::count(const ResultBatch& batch, Duration now, const std::vector<Run>& runs) {
  ModelCounters& counters = this->counters();
  const Steps steps{batch.called - batch.started, batch.ended - batch.called, now - batch.ended};
  RequestSums sums;
  std::uint64_t size = 0;
  std::uint64_t going_on = 0;
  for (const Run& run : runs) {
    if (run.size == 0) continue;
    const Duration spent = now - run.arrived;
    const Duration queued = batch.started - run.arrived;
    // A run that the model wants repeated counts like any other.
    if (run.reason == kStillOpen) {
      going_on += run.size;
      held_[run.ticket].queued = queued;
      held_[run.ticket].steps = steps;
    } else if (!run.reason.empty() && run.reason != kComesBack) {
      counters.failed(failure_reason(run.reason), spent);
    } else {
      sums = {sums.done + 1, sums.spent + spent, sums.queued + queued};
      size += run.size;
      if (run.reason.empty()) counters.observe({now, spent, queued, steps});
    }
  }
  if (sums.done != 0 || going_on != 0) counters.executed(1, size, sums, steps, going_on);
  counters.last_ended = batch.ended;
}

// The bytes of a record's tensors; none where one does not exist.
nb::object RequestsAtStub::buffers(const RecordView& record) const {
  auto& book = nb::cast<LeaseBook&>(hooks_->book);
  std::vector<stub::Place> places;
  places.reserve(record.tensors());
  for (std::size_t index = 0; index < record.tensors(); ++index) {
    places.push_back(stub::place_of(record.ref(index)));
    if (!book.exists(places.back())) return {};
  }
  return LentBuffers::make(book.spans(places));
}

// A response without anything out of the ordinary is made here; Python sees to all others, and
// words what is wrong with one.
Decoded RequestsAtStub::decode(const RecordView& record, const Held& held) {
  auto& reader = nb::cast<RecordReader&>(reader_);
  if (is_plain(record, held)) {
    const RecordReader::Tensors tensors = reader.tensors(record);
    if (record.sizes_fit(tensors.kinds)) {
      if (nb::object buffers = this->buffers(record); buffers.is_valid()) {
        nb::object response = make_infer_response(hooks_->response, tensors.signature,
                                                  tensors.shapes, std::move(buffers));
        infer_response(response).set(InferResponse::kMemory, hooks_->memory);
        infer_response(response).set(InferResponse::kRefs, RecordReader::refs(record));
        return {std::move(response), nb::none()};
      }
    }
  }
  const nb::object made = hooks_->decode(reader.record(record), held.request);
  return {made[0], made[1]};
}

nb::tuple RequestsAtStub::respond(const nb::bytes& message, Duration now) {
  nb::list outcomes;
  nb::list closed;
  ResponsesMessage decoded;
  nb::object error = stopped([&] { decoded = decode_responses({message.c_str(), message.size()}); },
                             "RESPONSES message: ");
  const auto take = [&](const RecordView& record) {
    core_.check_response(record.ticket());
    const Held& held = held_[record.ticket()];
    const nb::object request = held.request;
    Decoded made{nb::none(), nb::none()};
    if ((record.word() & kResponseEmpty) == 0) made = decode(record, held);
    const bool last = (record.word() & kResponseOpen) == 0;
    if (last) end_response(record.ticket(), made.reason, now, closed);
    if (last || !made.outcome.is_none()) {
      outcomes.append(nb::make_tuple(request, made.outcome, last));
    }
  };
  if (error.is_none()) {
    error = stopped(
        [&] {
          for (const RecordView& record : decoded.records) take(record);
        },
        "");
  }
  counters().copied(decoded.copied);
  return nb::make_tuple(std::move(outcomes), std::move(closed), std::move(error));
}

void RequestsAtStub::end_response(Ticket ticket, const nb::object& reason, Duration now,
                                  nb::list& closed) {
  const nb::object request = held_[ticket].request;
  const std::string why(reason.is_none() ? std::string_view() : text_of(reason));
  if (core_.end_response(ticket)) {
    count_closed(held_[ticket], why, now);
    leave(ticket, infer_request(request));
    closed.append(request);
  } else {
    held_[ticket].early_reason = why;
    infer_request(request).ticket = kAnswered;
    forget_memory(infer_request(request));
  }
}

void RequestsAtStub::count_closed(const Held& held, std::string_view reason, Duration now) {
  if (held.size == 0) return;
  const Duration spent = now - held.arrived;
  if (!reason.empty()) {
    counters().failed(failure_reason(reason), spent);
    return;
  }
  counters().answered(held.size, spent, held.queued, held.steps);
  counters().observe({now, spent, held.queued, held.steps});
}

// -- memory --------------------------------------------------------------------------------------

void RequestsAtStub::leave(Ticket ticket, InferRequest& request) {
  request.ticket = kAnswered;
  forget_memory(request);
  settle(ticket);
}

void RequestsAtStub::forget_memory(InferRequest& request) {
  request.take(InferRequest::kSlot);
  request.take(InferRequest::kRanges);
  request.take(InferRequest::kClient);
}

void RequestsAtStub::settle(Ticket ticket) {
  held_[ticket].request.reset();
  if (core_.settle(ticket)) {
    take_back(ticket);
  } else if (!on_kept_.is_none()) {
    on_kept_(kept(ticket));
  }
}

// The ticket is free: what was lent under it goes back to whom it belongs.
void RequestsAtStub::take_back(Ticket ticket) {
  const Held held = std::exchange(held_[ticket], {});
  if (held.slot.is_valid()) hooks_->free(held.slot);
}

bool RequestsAtStub::settle_kept() {
  std::vector<Ticket> settled = core_.settle_kept();
  for (const Ticket ticket : core_.settle_answers(core_.answers())) settled.push_back(ticket);
  for (const Ticket ticket : settled) {
    const nb::object ranges = kept(ticket);
    take_back(ticket);
    if (!on_ended_.is_none()) on_ended_(ranges);
  }
  return core_.kept() + core_.answers() != 0;
}

nb::object RequestsAtStub::lend(nb::object ranges) {
  for (const Ticket ticket : core_.settle_answers(kLooks)) {
    const nb::object before = kept(ticket);
    take_back(ticket);
    if (!on_ended_.is_none()) on_ended_(before);
  }
  if (!buffers_ || core_.free_tickets() == 0) return nb::none();
  if (!has_bytes(ranges)) return nb::int_(kNoLease);
  const Ticket ticket = core_.lend_answer();
  held_[ticket].kept = std::move(ranges);
  if (!on_kept_.is_none()) on_kept_(held_[ticket].kept);
  return nb::int_(ticket);
}

nb::list RequestsAtStub::all_kept() const {
  nb::list all;
  for (const Held& held : held_) {
    if (held.kept.is_valid()) all.append(held.kept);
  }
  return all;
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
    const nb::object request = held_[ticket].request;
    // Of memory that was handed on already nobody can be the owner again: only a stub that lies has
    // answered a request that it has not started.
    if (left == Left::kUnstarted && !held_[ticket].shared) {
      held_[ticket] = {};
      unstarted.append(request);
      continue;
    }
    take_back(ticket);
    if (left != Left::kOver) {
      infer_request(request).take(InferRequest::kClient);
      started.append(request);
    }
  }
  hooks_.reset();
  on_kept_ = on_ended_ = nb::none();
  buffers_.reset();
  return nb::make_tuple(std::move(started), std::move(unstarted));
}

}  // namespace at_stub

void bind_in_flight(nanobind::module_& module) {
  namespace nb = nanobind;
  using at_stub::RequestsAtStub;
  nb::class_<RequestsAtStub> type(module, "InFlightRequests");
  type.def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::object, nb::handle>())
      .def_prop_ro("free_tickets", &RequestsAtStub::free_tickets)
      .def_prop_ro("open_requests", &RequestsAtStub::open_requests)
      .def_prop_ro("idle", &RequestsAtStub::idle)
      .def("holds", &RequestsAtStub::holds)
      .def("watch", &RequestsAtStub::watch, nb::arg().none(), nb::arg().none())
      .def("enter", &RequestsAtStub::enter, nb::arg(), nb::arg().none())
      .def("take_frame", &RequestsAtStub::take_frame)
      .def("cancel", &RequestsAtStub::cancel)
      .def("passed_on", &RequestsAtStub::passed_on)
      .def("complete", &RequestsAtStub::complete)
      .def("respond", &RequestsAtStub::respond)
      .def("settle_kept", &RequestsAtStub::settle_kept)
      .def("lend", &RequestsAtStub::lend)
      .def_prop_ro("lent_answers", &RequestsAtStub::lent_answers)
      .def("slot", &RequestsAtStub::slot)
      .def("kept", &RequestsAtStub::kept)
      .def("all_kept", &RequestsAtStub::all_kept)
      .def("share", &RequestsAtStub::share)
      .def("left", &RequestsAtStub::left)
      .def("close", &RequestsAtStub::close);
}

}  // namespace gpubridge
