// The requests at a stub as Python sees them: gpubridge/_native.pyi says what the parts mean.
#pragma once

#include "buffer_view.h"
#include "clock.h"
#include "heap_type.h"
#include "ipc/busy_poll_binding.h"
#include "ipc/datagrams.h"
#include "ipc/in_flight.h"
#include "ipc/infer_request_binding.h"
#include "ipc/memory_ranges_binding.h"
#include "ipc/messages.h"
#include "ipc/model_counters.h"
#include "ipc/records_binding.h"
#include "memory/lease_book.h"
#include "python_object.h"
#include "schedule/request_dispatch_binding.h"

namespace gpubridge::at_stub {

// Decides when messages leave for the stubs of a server.
//
// To wake a stub for a message, and then the server for its result, takes several times what a
// small request takes. So messages wait at the end of a turn of the event loop, where requests are
// added to them, as long as the loop has other events to see to.
class SendTurn {
 public:
  // `events` is readable while the event loop has events; -1 where it does not tell. `call_soon`
  // has something called at the end of its turn. There are so many processors.
  SendTurn(nb::object call_soon, int events, std::size_t processors)
      : call_soon_(std::move(call_soon)), events_(events), processors_(processors) {}

  // True if nothing is going to leave soon, nor likely to be added.
  [[nodiscard]] bool is_quiet() const { return due_.empty() && !has_events(); }
  // Flushes what is at a stub when it is time.
  void add(nb::object stub);
  // A turn ends.
  void end();

  // A stub has got work, or has no more.
  void working(bool begins) { working_ += begins ? 1 : -1; }
  // True if a stub that is woken has to share a processor with this process, or a stub at work.
  [[nodiscard]] bool processors_busy() const { return working_ + 1 >= processors_; }

 private:
  [[nodiscard]] bool has_events() const;
  void call_at_end() { call_soon_(nb::find(this).attr("end")); }

  nb::object call_soon_;
  int events_;
  std::size_t processors_;
  std::size_t working_ = 0;
  std::vector<nb::object> due_;
  std::int64_t since_ = 0;  // when the first of them came
};

constexpr long long kAnswered = -1;
constexpr std::size_t kNoOutcome = static_cast<std::size_t>(-1);

// True if any of some memory ranges has bytes.
bool has_bytes(nb::handle ranges);

template <typename Cell>
std::span<Cell> cells_of(const BufferView& view) {
  return {static_cast<Cell*>(view.data()), view.size() / sizeof(Cell)};
}

// The buffers of the control page's cells.
struct ControlBuffers {
  ControlBuffers(nb::handle lent, nb::handle cancelled, nb::handle passed_on, nb::handle received,
                 nb::handle progress, nb::handle claimed)
      : lent(lent, PyBUF_WRITABLE),
        cancelled(cancelled, PyBUF_WRITABLE),
        passed_on(passed_on, PyBUF_WRITABLE),
        received(received, PyBUF_WRITABLE),
        progress(progress, PyBUF_WRITABLE),
        claimed(claimed, PyBUF_WRITABLE) {
    const std::size_t tickets = this->lent.size();
    if (this->cancelled.size() != tickets || this->progress.size() < 2 * sizeof(std::uint64_t) ||
        this->claimed.size() != sizeof(std::uint64_t) ||
        this->passed_on.size() != tickets * sizeof(std::uint32_t) ||
        this->received.size() != tickets * sizeof(std::uint32_t)) {
      throw nb::value_error("the cells are not those of one control page");
    }
  }

  [[nodiscard]] ControlCells cells() const {
    return {cells_of<std::uint8_t>(lent),
            cells_of<std::uint8_t>(cancelled),
            cells_of<std::uint32_t>(passed_on),
            cells_of<std::uint32_t>(received),
            cells_of<const std::uint64_t>(progress),
            cells_of<std::uint64_t>(claimed)};
  }

  BufferView lent;
  BufferView cancelled;
  BufferView passed_on;
  BufferView received;
  BufferView progress;
  BufferView claimed;
};

// A request at the stub, or what is left of it.
struct Held {
  nb::object request;
  nb::object slot;         // goes back to the arena
  nb::object kept;         // is only held
  bool in_slot = false;    // its inputs lie in its slot, and nothing else is lent
  bool of_client = false;  // its client's own memory is read or written for it
  bool shared = false;     // what was the slot is kept, since others hold it, too
  bool traced = false;
  std::uint64_t size = 0;  // its batch size; 0 for a place in a batch that no request fills
  Duration arrived = 0;
  // Of an open request: its time in the queue, and the steps of its batch.
  Duration queued = 0;
  Steps steps;
  std::string early_reason;
};

// Python's callbacks for the requests at a stub; null after the end.
struct Hooks {
  explicit Hooks(nb::handle hooks) : given(nb::borrow(hooks)) {}

  nb::object given;
  nb::object free = given.attr("free");
  nb::object share = given.attr("share");
  RegionNames names{given.attr("announcer")};
  nb::object context = given.attr("context");
  nb::object decode = given.attr("decode");
  nb::object cancelled = given.attr("cancelled");
  nb::object send = given.attr("send");
  nb::object send_long = given.attr("send_long");
  nb::object receive = given.attr("receive");
  nb::object failed = given.attr("failed");
  nb::object closed = given.attr("closed");
  nb::object turn = given.attr("turn");  // a SendTurn
  nb::object feed = given.attr("feed");
  nb::object memory = given.attr("memory");
  std::uint64_t owner = nb::cast<std::uint64_t>(given.attr("owner"));  // of its regions
  nb::object book = memory.attr("book");  // a LeaseBook, of that memory
  nb::object counters = given.attr("counters");
  nb::object response = given.attr("response");
  nb::object placed = given.attr("placed");
  nb::object batch = given.attr("batch");
  nb::object no_context = given.attr("no_context");
};

struct Decoded {
  nb::object outcome;
  nb::object reason;  // why the request failed; None if it has not
};

// As many as the largest usual batch takes.
inline constexpr std::size_t kFewTickets = 256;

class RequestsAtStub {
 public:
  // Result of `receive`.
  enum class Received { kNothing, kMessage, kClosed };

  // `descriptor` is the channel's, which stays the caller's and open until `close`.
  RequestsAtStub(nb::handle lent, nb::handle cancelled, nb::handle passed_on, nb::handle received,
                 nb::handle progress, nb::handle claimed, nb::object reader, nb::handle hooks,
                 int descriptor)
      : buffers_(std::in_place, lent, cancelled, passed_on, received, progress, claimed),
        core_(buffers_->cells()),
        reader_(std::move(reader)),
        hooks_(std::in_place, hooks),
        descriptor_(descriptor) {}

  // Number of further requests that the stub can take; if few are left, it first releases those
  // whose memory the stub no longer uses.
  [[nodiscard]] std::size_t free_tickets() {
    if (core_.free_tickets() < kFewTickets) release_kept();
    return core_.free_tickets();
  }
  [[nodiscard]] std::size_t open_requests() const { return core_.open_requests(); }
  [[nodiscard]] std::size_t unstarted() const { return core_.unstarted(); }
  [[nodiscard]] std::uint64_t oldest() const { return core_.oldest(); }
  [[nodiscard]] bool holds(std::uint64_t sequence) const { return core_.holds(sequence); }
  [[nodiscard]] std::uint64_t started() const { return core_.started(); }
  // True if the stub has begun the batch of a request that is at the stub.
  [[nodiscard]] bool has_started(nb::handle request) const {
    const auto ticket = infer_request(request).ticket;
    return is_at_stub(ticket) && core_.has_started(static_cast<Ticket>(ticket));
  }
  // True if `execute` is known to run for the batch of a request that is not answered.
  [[nodiscard]] bool executes(nb::handle request) const {
    const auto ticket = infer_request(request).ticket;
    return is_at_stub(ticket) && core_.executes(static_cast<Ticket>(ticket));
  }
  // Number of batches in which a request has succeeded.
  [[nodiscard]] std::uint64_t succeeded() const { return succeeded_; }
  // True if batches can be withdrawn: not where events on a device follow what is lent.
  [[nodiscard]] bool claims() const { return on_kept_.is_none() && core_.claims(); }

  // Tells `feed`, an InstanceFeed, of answers from now on.
  void tell_feed(nb::object feed) {
    if (hooks_) hooks_->feed = std::move(feed);
  }
  void watch(nb::object on_kept, nb::object on_ended) {
    on_kept_ = std::move(on_kept);
    on_ended_ = std::move(on_ended);
  }
  // Tells a BusyPoll of each batch that comes alone, of the first that does not, and when all are
  // answered; None to tell nothing.
  void poll_with(nb::object poll) {
    busy_poll_ = poll.is_none() ? nullptr : &nb::cast<BusyPoll&>(poll);
    busy_poll_object_ = std::move(poll);
    alone_ = together_ = false;
  }
  // What it tells; null for nothing.
  [[nodiscard]] BusyPoll* busy_poll() const { return busy_poll_; }
  // Has responses stored whose readers are slow: `store` makes what stores those of a request.
  void store_with(nb::object store) { store_ = std::move(store); }
  // True if messages wait for the channel, so that others have to wait behind them.
  void block(bool blocked) { blocked_ = blocked; }

  // A request that could not be written, and what that raised.
  struct Unsent {
    nb::object request;
    nb::object error;
  };
  // Sends a batch; returns the requests that it leaves out.
  std::vector<Unsent> submit(nb::handle requests);
  void flush();
  // True if another stub would have to share a processor if it were woken.
  [[nodiscard]] bool processors_busy() const { return hooks_ && turn().processors_busy(); }

  // Withdraws the requests whose batches the stub has not begun; returns them in order.
  nb::list withdraw();
  void cancel(nb::handle request, bool running_only, std::uint8_t how);
  void passed_on(nb::handle request, std::uint32_t responses) {
    const auto ticket = infer_request(request).ticket;
    if (is_at_stub(ticket)) core_.passed_on(static_cast<Ticket>(ticket), responses);
  }

  // Takes one message of the channel.
  [[nodiscard]] Received receive();
  void on_readable() {
    if (receive() == Received::kClosed && hooks_) nb::object(hooks_->closed)();
  }
  // Takes a message with results or responses that came at `now`; 0: just now.
  void take(std::string_view message, Duration now);

  // Takes what a dead stub had gathered, unless it has come by the channel, too.
  void take_gathered(std::string_view message);

  bool release_kept();
  nb::object lend(nb::object ranges);
  // Finds memory that is lent to the stub, to hand it on. Throws MalformedRecord where it is not.
  RangeItem find(const TensorRef& ref);
  // MemoryRanges of some references, which may also name the stub's own memory.
  nb::object ranges(std::span<const TensorRef> refs);

  [[nodiscard]] std::size_t lent_answers() const { return core_.answers(); }
  [[nodiscard]] std::size_t kept_requests() const { return core_.kept(); }
  [[nodiscard]] nb::list all_kept() const;
  [[nodiscard]] nb::list left() const;
  nb::tuple close(std::uint64_t started_last);

 private:
  struct Ending {
    Ticket ticket = 0;
    std::uint32_t flags = 0;
    Decoded decoded;
  };

  // A request, and its outcome, null after it had one; its durations if it has succeeded.
  struct Outcome {
    nb::object request;
    nb::object outcome;
    bool last = true;
    std::optional<Observation> observed = std::nullopt;
  };
  // Results of a message.
  struct Taken {
    std::vector<Outcome> outcomes;
    AnsweredBatches answered;
    bool closed = false;  // whether requests ended after their batches
    std::uint64_t copied = 0;
  };
  // A request of a batch that has ended, and why it has not just succeeded, if so.
  struct Run {
    Ticket ticket = 0;
    std::uint64_t size = 0;
    Duration arrived = 0;
    std::string reason;
    std::size_t outcome = kNoOutcome;  // its place in the results of the message
  };

  [[nodiscard]] ModelCounters& counters() const {
    return nb::cast<ModelCounters&>(hooks_->counters);
  }
  [[nodiscard]] bool is_at_stub(std::int64_t ticket) const { return ticket >= 0 && buffers_; }
  [[nodiscard]] nb::object kept(Ticket ticket) const {
    const nb::object& kept = held_[ticket].kept;
    return kept.is_valid() ? kept : nb::none();
  }

  // What there is of a ticket that the core has given out.
  Held& hold(Ticket ticket) {
    while (held_.size() < core_.known_tickets()) held_.emplace_back();
    return held_[ticket];
  }
  [[nodiscard]] SendTurn& turn() const { return nb::cast<SendTurn&>(hooks_->turn); }
  // Tells the turn whether there is a batch at the stub.
  void note_work();
  [[nodiscard]] bool enter(nb::handle requests, std::vector<Unsent>& unsent);
  void take_back_unsent(std::uint64_t sequence, Ticket ticket);
  [[nodiscard]] nb::object long_parameters(const InferRequest& request) const;
  void write(InferRequest& request, std::string& records);
  void write_slot(const InferRequest& source, RecordParts& parts, std::string& records);

  void complete(std::string_view message, Duration now, Taken& taken);
  void complete_batch(ResultBatch& batch, Duration now, Taken& taken);
  nb::object end(const Ending& ending, Taken& taken);
  void respond(std::string_view message, Duration now, Taken& taken);
  void tell(const Taken& taken, Duration now, const nb::object& error);
  void count(const ResultBatch& batch, Duration now, const std::vector<Run>& runs, Taken& taken);
  static void note_answer(const Outcome& outcome, ModelCounters& counters) {
    const Observation& observed = *outcome.observed;
    const auto now = static_cast<Duration>(monotonic_ns());
    const Duration answer = outcome.outcome.is_valid() ? now - observed.now : 0;
    if (counters.passed_on(observed, answer)) {
      counters.slow.add({observed, answer, infer_request(outcome.request).shown_identifier()});
    }
  }
  Decoded decode(const RecordView& record, const Held& held);
  [[nodiscard]] nb::object buffers(const RecordView& record) const;
  // The response of a record that says nothing out of the ordinary; none for other records.
  nb::object plain_response(const RecordView& record, const Held& held);
  // The response of outputs that all stayed in the slot of their request.
  nb::object response_in_slot(const RecordView& record, nb::handle signature, nb::handle shapes);
  [[nodiscard]] std::optional<Observation> end_response(Ticket ticket, const nb::object& reason,
                                                        Duration now, Taken& taken);
  [[nodiscard]] std::optional<Observation> count_closed(const Held& held, std::string_view reason,
                                                        Duration now);

  void leave(Ticket ticket, InferRequest& request);
  static void forget_memory(InferRequest& request);
  void release_memory(Ticket ticket);
  // The ticket is free: what was lent under it goes back to whom it belongs.
  void take_back(Ticket ticket) {
    const Held held = std::exchange(held_[ticket], {});
    if (held.slot.is_valid()) hooks_->free(held.slot);
  }
  nb::object release(Ticket ticket);

  std::optional<ControlBuffers> buffers_;
  InFlightRequests core_;
  std::deque<Held> held_;  // of all tickets that were ever used; none moves
  nb::object reader_;
  std::optional<Hooks> hooks_;
  nb::object on_kept_ = nb::none();
  nb::object on_ended_ = nb::none();
  nb::object store_ = nb::none();
  std::uint64_t sequence_ = 0;
  std::uint64_t succeeded_ = 0;
  ExecuteFrame frame_;
  int descriptor_;
  std::vector<char> received_ = std::vector<char>(kDatagramLimit);
  nb::object busy_poll_object_ = nb::none();
  BusyPoll* busy_poll_ = nullptr;
  bool alone_ = false;
  bool together_ = false;  // whether it knows that batches do not come alone
  bool blocked_ = false;
  bool flush_due_ = false;
  bool working_ = false;  // as last reported to the turn
};

}  // namespace gpubridge::at_stub
