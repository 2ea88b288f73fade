// The requests at a stub as Python sees them: gpubridge/_native.pyi says what the parts mean.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "buffer_view.h"
#include "ipc/in_flight.h"
#include "ipc/ipc_bindings.h"
#include "ipc/messages.h"
#include "ipc/record_reader.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

constexpr std::uint32_t kNoLease = 0xFFFFFFFFU;
constexpr std::size_t kFrameBytes = 64UL * 1024;
constexpr std::size_t kFrameBatches = 6;
constexpr int kAnswered = -1;
// Answers that are looked at for each new one: they end nearly in order.
constexpr std::size_t kLooks = 4;

// Instead of the reason for which a request failed.
constexpr const char* kStillOpen = "open";
constexpr const char* kComesBack = "comes back";

nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

// The name of an attribute, made once.
class Name {
 public:
  explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}

  [[nodiscard]] nb::object of(nb::handle object) const {
    return checked(PyObject_GetAttr(object.ptr(), text_));
  }
  void set(nb::handle object, nb::handle value) const {
    if (PyObject_SetAttr(object.ptr(), text_, value.ptr()) != 0) throw nb::python_error();
  }

 private:
  PyObject* text_;
};

struct Names {
  Name client{"client"};
  Name context{"context"};
  Name dims{"dims"};
  Name encoded{"encoded"};
  Name identifier{"identifier"};
  Name instance{"instance"};
  Name offset{"offset"};
  Name pattern{"pattern"};
  Name places{"places"};
  Name ranges{"ranges"};
  Name region{"region"};
  Name segment{"segment"};
  Name signature{"signature"};
  Name slot{"slot"};
  Name start{"start"};
  Name ticket{"ticket"};
  Name unsent{"unsent"};
};

const Names& names() {
  static const Names made;
  return made;
}

std::string_view bytes_of(nb::handle object) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(object.ptr(), &data, &size) != 0) throw nb::python_error();
  return {data, static_cast<std::size_t>(size)};
}

std::string_view text_of(nb::handle object) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (data == nullptr) throw nb::python_error();
  return {data, static_cast<std::size_t>(size)};
}

template <typename Cell>
std::span<Cell> cells_of(const BufferView& view) {
  return {static_cast<Cell*>(view.data()), view.size() / sizeof(Cell)};
}

// The buffers of the control page's cells.
struct ControlBuffers {
  ControlBuffers(nb::handle lent, nb::handle cancelled, nb::handle passed_on, nb::handle progress)
      : lent(lent, PyBUF_WRITABLE),
        cancelled(cancelled, PyBUF_WRITABLE),
        passed_on(passed_on, PyBUF_WRITABLE),
        progress(progress, PyBUF_WRITABLE) {
    const std::size_t tickets = this->lent.size();
    if (this->cancelled.size() != tickets || this->progress.size() < 2 * sizeof(std::uint64_t) ||
        this->passed_on.size() != tickets * sizeof(std::uint32_t)) {
      throw nb::value_error("the cells are not those of one control page");
    }
  }

  [[nodiscard]] ControlCells cells() const {
    return {cells_of<std::uint8_t>(lent), cells_of<std::uint8_t>(cancelled),
            cells_of<std::uint32_t>(passed_on), cells_of<const std::uint64_t>(progress)};
  }

  BufferView lent;
  BufferView cancelled;
  BufferView passed_on;
  BufferView progress;
};

// A request at the stub, or what is left of it.
struct Held {
  nb::object request;
  nb::object slot;      // goes back to the arena
  nb::object kept;      // is only held
  bool plain = false;   // its inputs lie in its slot, and nothing else is lent
  bool shared = false;  // what was the slot is kept, since others hold it, too
  std::string early_reason;
};

// What Python does for the requests at a stub; nothing after the end.
struct Hooks {
  explicit Hooks(nb::handle hooks)
      : free(hooks.attr("free")),
        views(hooks.attr("views")),
        announced(hooks.attr("announced")),
        announce(hooks.attr("announce")),
        references(hooks.attr("references")),
        decode(hooks.attr("decode")),
        memory(hooks.attr("memory")),
        response(hooks.attr("response")),
        batch(hooks.attr("batch")),
        no_context(hooks.attr("no_context")) {}

  nb::object free;
  nb::object views;
  nb::object announced;
  nb::object announce;
  nb::object references;
  nb::object decode;
  nb::object memory;
  nb::object response;
  nb::object batch;
  nb::object no_context;
};

struct Decoded {
  nb::object outcome;
  nb::object reason;  // why the request failed; None if it has not
};

class RequestsAtStub {
 public:
  RequestsAtStub(nb::handle lent, nb::handle cancelled, nb::handle passed_on, nb::handle progress,
                 nb::object reader, nb::handle hooks)
      : buffers_(std::in_place, lent, cancelled, passed_on, progress),
        core_(buffers_->cells()),
        held_(buffers_->lent.size()),
        reader_(std::move(reader)),
        hooks_(std::in_place, hooks),
        new_tuple_(reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new))) {}

  [[nodiscard]] std::size_t free_tickets() const { return core_.free_tickets(); }
  [[nodiscard]] std::size_t open_requests() const { return core_.open_requests(); }
  [[nodiscard]] bool idle() const { return core_.idle(); }
  [[nodiscard]] bool holds(std::uint64_t sequence) const { return core_.holds(sequence); }

  void watch(nb::object on_kept, nb::object on_ended) {
    on_kept_ = std::move(on_kept);
    on_ended_ = std::move(on_ended);
  }

  bool enter(nb::handle requests, nb::handle owner);
  nb::object take_frame(bool alone) {
    if (frame_.batches() == 0) return nb::none();
    const std::string message = frame_.take(alone);
    return nb::bytes(message.data(), message.size());
  }

  std::optional<std::uint64_t> cancel(std::int64_t ticket, bool running_only, bool still_read) {
    if (!is_at_stub(ticket)) return std::nullopt;
    return core_.cancel(static_cast<Ticket>(ticket), running_only, still_read);
  }
  void passed_on(std::int64_t ticket, std::uint32_t responses) {
    if (is_at_stub(ticket)) core_.passed_on(static_cast<Ticket>(ticket), responses);
  }

  nb::tuple complete(const nb::bytes& message);
  nb::tuple respond(const nb::bytes& message);

  bool settle_kept();
  nb::object lend(nb::object ranges);

  [[nodiscard]] std::size_t lent_answers() const { return core_.answers(); }
  [[nodiscard]] nb::object slot(std::uint64_t ticket) const { return memory(ticket, &Held::slot); }
  [[nodiscard]] nb::object kept(std::uint64_t ticket) const { return memory(ticket, &Held::kept); }
  [[nodiscard]] nb::list all_kept() const;
  void share(std::uint64_t ticket, nb::object kept) {
    held_.at(ticket).slot.reset();
    held_[ticket].kept = std::move(kept);
    held_[ticket].shared = true;
  }
  [[nodiscard]] nb::list left() const;
  nb::tuple close(std::uint64_t started_last);

 private:
  struct Ending {
    Ticket ticket = 0;
    std::uint32_t flags = 0;
    Decoded decoded;
  };

  [[nodiscard]] bool is_at_stub(std::int64_t ticket) const { return ticket >= 0 && buffers_; }
  [[nodiscard]] nb::object memory(std::uint64_t ticket, nb::object Held::* part) const {
    if (ticket >= held_.size() || !(held_[ticket].*part).is_valid()) return nb::none();
    return held_[ticket].*part;
  }

  void write(nb::handle request, std::string& records);
  void write_slot(nb::handle source, RecordParts& parts, std::string& records);
  void write_references(nb::handle request, RecordParts& parts, std::string& records);

  nb::object complete_batch(const ResultBatch& batch, nb::list& outcomes);
  void end(const Ending& ending, nb::list& outcomes, nb::dict& failures);
  Decoded decode(const RecordView& record, const Held& held);
  [[nodiscard]] bool is_plain(const RecordView& record, const Held& held) const {
    return held.plain && on_kept_.is_none() && (record.word() & ~kResponseOpen) == 0 &&
           record.context().empty();
  }
  void end_response(Ticket ticket, const nb::object& reason, nb::list& closed);

  void leave(Ticket ticket, nb::handle request);
  void forget_memory(nb::handle request);
  void settle(Ticket ticket);
  void take_back(Ticket ticket);
  nb::object named(nb::handle type, const nb::tuple& fields) const {
    return checked(new_tuple_(reinterpret_cast<PyTypeObject*>(type.ptr()),
                              nb::make_tuple(fields).ptr(), nullptr));
  }

  std::optional<ControlBuffers> buffers_;
  InFlightRequests core_;
  std::vector<Held> held_;
  nb::object reader_;
  std::optional<Hooks> hooks_;
  newfunc new_tuple_;
  nb::object on_kept_ = nb::none();
  nb::object on_ended_ = nb::none();
  std::uint64_t sequence_ = 0;
  ExecuteFrame frame_;
};

// -- sending -------------------------------------------------------------------------------------

bool has_bytes(nb::handle ranges) {
  for (nb::handle part : ranges) {
    if (nb::cast<std::uint64_t>(part[2]) != 0) return true;
  }
  return false;
}

// What is lent for a request.
Held held_for(nb::handle request) {
  Held held;
  held.request = nb::borrow(request);
  if (nb::object slot = names().slot.of(request); !slot.is_none()) held.slot = std::move(slot);
  nb::object ranges = names().ranges.of(request);
  held.plain = ranges.is_none();
  if (!held.plain && has_bytes(ranges)) held.kept = std::move(ranges);
  return held;
}

bool RequestsAtStub::enter(nb::handle requests, nb::handle owner) {
  if (!buffers_ || nb::len(requests) > core_.free_tickets()) {
    throw nb::value_error("the stub has no ticket left for a request");
  }
  std::vector<InFlightRequests::Entering> entering;
  std::vector<Held> lent;
  for (nb::handle request : requests) {
    lent.push_back(held_for(request));
    // The stub says that it is done with what it was lent, if there is something.
    const bool has_memory =
        lent.back().plain ? lent.back().slot.is_valid() : lent.back().kept.is_valid();
    entering.push_back({has_memory, nb::cast<std::uint32_t>(names().unsent.of(request))});
  }
  const std::uint64_t sequence = ++sequence_;
  const std::span<const Ticket> tickets = core_.enter(sequence, entering);
  for (std::size_t index = 0; index < lent.size(); ++index) {
    const nb::object request = lent[index].request;
    held_[tickets[index]] = std::move(lent[index]);
    names().ticket.set(request, nb::int_(tickets[index]));
    names().instance.set(request, owner);
  }
  std::string records;
  for (nb::handle request : requests) write(request, records);
  frame_.add(sequence, lent.size(), records);
  return frame_.batches() >= kFrameBatches || frame_.size() > kFrameBytes;
}

void RequestsAtStub::write(nb::handle request, std::string& records) {
  const nb::object pattern = names().pattern.of(request);
  const nb::handle source = pattern.is_none() ? request : nb::handle(pattern);
  const nb::object signature = names().signature.of(request);
  const nb::object dims = names().dims.of(request);
  const nb::object identifier = names().identifier.of(request);
  RecordParts parts;
  parts.ticket = nb::cast<Ticket>(names().ticket.of(request));
  parts.signature = bytes_of(signature);
  parts.dims = bytes_of(dims);
  parts.identifier = text_of(identifier);
  if (!names().ranges.of(source).is_none()) {
    write_references(request, parts, records);
    return;
  }
  const nb::object context = names().context.of(request);
  nb::object encoded;
  if (!context.is(hooks_->no_context)) {
    encoded = names().encoded.of(context)();
    parts.context = bytes_of(encoded);
  }
  write_slot(source, parts, records);
}

// Makes room for a record at the end of `records`, and writes all but its references.
char* write_head(const RecordParts& parts, std::string& records) {
  const std::size_t at = records.size();
  records.resize(at + parts.size());
  return parts.write(records.data() + at);
}

void RequestsAtStub::write_slot(nb::handle source, RecordParts& parts, std::string& records) {
  const nb::object slot = names().slot.of(source);
  if (slot.is_none()) {
    write_head(parts, records);
    return;
  }
  const nb::object segment = names().segment.of(slot);
  const nb::object region = names().region.of(segment);
  const int announced = PySet_Contains(hooks_->announced.ptr(), region.ptr());
  if (announced < 0) throw nb::python_error();
  if (announced == 0) hooks_->announce(segment);
  const nb::object places = names().places.of(source);
  const auto base = nb::cast<std::uint64_t>(names().offset.of(slot)) +
                    nb::cast<std::uint64_t>(names().start.of(source));
  const auto lease = nb::cast<Ticket>(names().ticket.of(source));
  const auto number = nb::cast<std::uint64_t>(region);
  parts.tensors = static_cast<std::uint32_t>(nb::len(places));
  char* at = write_head(parts, records);
  for (nb::handle place : places) {
    const auto offset = nb::cast<std::int64_t>(place[0]);
    at = write_ref(at, {number, base + static_cast<std::uint64_t>(offset),
                        nb::cast<std::uint64_t>(place[1]), lease});
  }
}

// The fields of references come flat: region, offset, size, lease of each, one after another.
void RequestsAtStub::write_references(nb::handle request, RecordParts& parts,
                                      std::string& records) {
  const nb::object made = hooks_->references(request);
  const nb::object refs = made[0];
  const nb::object context = made[1];
  parts.context = bytes_of(context);
  std::vector<std::uint64_t> fields;
  for (nb::handle field : refs) fields.push_back(nb::cast<std::uint64_t>(field));
  parts.tensors = static_cast<std::uint32_t>(fields.size() / 4);
  char* at = write_head(parts, records);
  for (std::size_t index = 0; index < 4UL * parts.tensors; index += 4) {
    at = write_ref(at, {fields[index], fields[index + 1], fields[index + 2],
                        static_cast<std::uint32_t>(fields[index + 3])});
  }
}

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

nb::tuple RequestsAtStub::complete(const nb::bytes& message) {
  nb::list outcomes;
  nb::list batches;
  std::vector<ResultBatch> decoded;
  nb::object error = stopped([&] { decoded = decode_results({message.c_str(), message.size()}); },
                             "RESULTS message: ");
  if (error.is_none()) {
    error = stopped(
        [&] {
          for (const ResultBatch& batch : decoded) {
            batches.append(complete_batch(batch, outcomes));
          }
        },
        "");
  }
  return nb::make_tuple(std::move(outcomes), std::move(batches), std::move(error));
}

// A batch changes nothing until all of it is understood.
nb::object RequestsAtStub::complete_batch(const ResultBatch& batch, nb::list& outcomes) {
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
  for (const Ticket ticket : core_.end_batch(batch.sequence)) {
    requests.append(held_[ticket].request);
  }
  nb::dict failures;
  for (const Ending& ending : endings) end(ending, outcomes, failures);
  return named(hooks_->batch,
               nb::make_tuple(batch.sequence, batch.started, batch.called, batch.ended,
                              batch.copied, std::move(requests), std::move(failures)));
}

void RequestsAtStub::end(const Ending& ending, nb::list& outcomes, nb::dict& failures) {
  using Step = InFlightRequests::Step;
  const nb::object request = held_[ending.ticket].request;
  nb::object reason = nb::none();
  switch (core_.end_in_batch(ending.ticket, ending.flags)) {
    case Step::kOpen:
      reason = nb::str(kStillOpen);
      break;
    case Step::kWasEarly: {
      const std::string early = std::exchange(held_[ending.ticket].early_reason, {});
      if (!early.empty()) reason = nb::str(early.c_str());
      settle(ending.ticket);
      break;
    }
    case Step::kComesBack:
      reason = nb::str(kComesBack);
      held_[ending.ticket] = {};
      names().ticket.set(request, nb::int_(kAnswered));
      names().instance.set(request, nb::none());
      break;
    case Step::kOver:
      reason = ending.decoded.reason;
      leave(ending.ticket, request);
      outcomes.append(nb::make_tuple(request, ending.decoded.outcome));
  }
  if (!reason.is_none()) failures[request] = reason;
}

// A response without anything out of the ordinary is made here; Python sees to all others, and
// words what is wrong with one.
Decoded RequestsAtStub::decode(const RecordView& record, const Held& held) {
  auto& reader = nb::cast<RecordReader&>(reader_);
  if (is_plain(record, held)) {
    const RecordReader::Tensors tensors = reader.tensors(record);
    if (record.sizes_fit(tensors.kinds)) {
      nb::object refs = RecordReader::refs(record);
      nb::object views = hooks_->views(refs);
      return {hooks_->response(tensors.signature, tensors.shapes, std::move(views), nb::none(),
                               hooks_->memory, std::move(refs)),
              nb::none()};
    }
  }
  const nb::object made = hooks_->decode(reader.record(record), held.request);
  return {made[0], made[1]};
}

nb::tuple RequestsAtStub::respond(const nb::bytes& message) {
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
    if (last) end_response(record.ticket(), made.reason, closed);
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
  return nb::make_tuple(std::move(outcomes), std::move(closed), decoded.copied, std::move(error));
}

void RequestsAtStub::end_response(Ticket ticket, const nb::object& reason, nb::list& closed) {
  const nb::object request = held_[ticket].request;
  const std::string why(reason.is_none() ? std::string_view() : text_of(reason));
  if (core_.end_response(ticket)) {
    leave(ticket, request);
    closed.append(nb::make_tuple(request, why.c_str()));
  } else {
    held_[ticket].early_reason = why;
    names().ticket.set(request, nb::int_(kAnswered));
    forget_memory(request);
  }
}

// -- memory --------------------------------------------------------------------------------------

void RequestsAtStub::leave(Ticket ticket, nb::handle request) {
  names().ticket.set(request, nb::int_(kAnswered));
  forget_memory(request);
  settle(ticket);
}

void RequestsAtStub::forget_memory(nb::handle request) {
  names().slot.set(request, nb::none());
  names().ranges.set(request, nb::none());
  names().client.set(request, nb::none());
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
      names().client.set(request, nb::none());
      started.append(request);
    }
  }
  hooks_.reset();
  on_kept_ = on_ended_ = nb::none();
  buffers_.reset();
  return nb::make_tuple(std::move(started), std::move(unstarted));
}

}  // namespace

void bind_in_flight(nb::module_& module) {
  nb::class_<RequestsAtStub> type(module, "InFlightRequests");
  type.attr("STILL_OPEN") = kStillOpen;
  type.attr("COMES_BACK") = kComesBack;
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
