// The requests at one stub: which there are, how far each is, and the memory that is lent for them.
#pragma once

#include <set>

#include "ipc/control_cells.h"
#include "ipc/messages.h"
#include "std.h"

namespace gpubridge {

using Ticket = std::uint32_t;

// Tickets name requests at a stub and the memory lent for them; who uses this keeps both, by
// ticket. A request enters once and leaves once: with its answer, or among those that a dead stub
// leaves. Its ticket is free again when the stub has let go of its memory, too.
//
// The model can write to all of the cells: they decide nothing but when memory of the stub's own
// requests is free, and which of its batches may be withdrawn.
class InFlightRequests {
 public:
  enum class State : std::uint8_t {
    kFree,
    kRunning,    // its batch is at the stub
    kEarly,      // answered, while its batch is still at the stub
    kOpen,       // its batch has ended, and its model still answers
    kKept,       // ended, but the stub still uses its memory
    kAnswer,     // no request: the memory of an answer to a call of the stub's model
    kWithdrawn,  // its batch is at the stub, which will not begin it
  };
  // Effect on a request of a record of its batch, which has ended.
  enum class Step { kEnded, kOpen, kWasEarly, kComesBack };
  // State in which a dead stub leaves a ticket.
  enum class Left { kEnded, kStarted, kUnstarted };

  // How a request is cancelled, as its cell has it: see gpubridge/transport/control.py.
  enum class Cancelled : std::uint8_t { kDropped = 1, kStillRead = 2, kGivenUp = 3 };

  struct Entering {
    bool has_memory = false;   // whether there is something that the stub says it is done with
    std::uint32_t unsent = 0;  // responses of earlier runs that have not left yet
  };
  struct Leaving {
    Ticket ticket = 0;
    Left left = Left::kEnded;
  };
  struct Member {
    std::uint64_t sequence = 0;  // its batch; 0 after that has ended
    Ticket ticket = 0;
  };

  // The cells must have the same number of tickets each, of which as many are used as are needed:
  // their pages take memory once they are.
  explicit InFlightRequests(const ControlCells& cells) : cells_(cells) {}

  [[nodiscard]] std::size_t free_tickets() const {
    return free_.size() + cells_.lent.size() - entries_.size();
  }
  // Number of tickets that have ever been used; others are above.
  [[nodiscard]] std::size_t known_tickets() const { return entries_.size(); }
  [[nodiscard]] std::size_t open_requests() const { return open_.size(); }
  // Requests of batches that the stub has not begun.
  [[nodiscard]] std::size_t unstarted() const {
    std::size_t count = 0;
    for (auto batch = batches_.upper_bound(started()); batch != batches_.end(); ++batch) {
      count += batch->second.size();
    }
    return count;
  }
  // True if no batch is at the stub.
  [[nodiscard]] bool idle() const { return batches_.empty(); }
  [[nodiscard]] bool holds(std::uint64_t sequence) const { return batches_.contains(sequence); }
  // The batch that the stub executes now, or next; 0 if there is none.
  [[nodiscard]] std::uint64_t oldest() const {
    return batches_.empty() ? 0 : batches_.begin()->first;
  }
  // True if the stub has begun the batch of a request.
  [[nodiscard]] bool has_started(Ticket ticket) const {
    const Entry& entry = entries_[ticket];
    return entry.state == State::kOpen || entry.sequence <= started();
  }
  // True if `execute` is known to run for the batch of a request that is not answered: the stub
  // says that it does that of a batch which it has.
  [[nodiscard]] bool executes(Ticket ticket) const {
    const Entry& entry = entries_[ticket];
    const std::uint64_t said = load_cell(cells_.progress[0]);
    return entry.state == State::kRunning && entry.sequence <= said && holds(said);
  }
  // The batch that the stub began last.
  [[nodiscard]] std::uint64_t started() const { return begun(load_cell(cells_.progress[0])); }
  // True if the stub lets batches be withdrawn.
  [[nodiscard]] bool claims() const { return load_cell(cells_.claimed[0]) >= kClaims; }

  // Gives the requests of a batch tickets; there must be enough of them.
  std::span<const Ticket> enter(std::uint64_t sequence, std::span<const Entering> requests) {
    std::vector<Ticket>& tickets = batches_[sequence];
    for (const Entering& request : requests) {
      const Ticket ticket = take();
      entries_[ticket] = {State::kRunning, sequence};
      store_cell<std::uint8_t>(cells_.lent[ticket], request.has_memory ? 1 : 0);
      store_cell<std::uint8_t>(cells_.cancelled[ticket], 0);
      store_cell(cells_.passed_on[ticket], 0U - request.unsent);
      store_cell(cells_.received[ticket], 0U);
      tickets.push_back(ticket);
    }
    return tickets;
  }

  // Takes a request out of a batch that has not been sent.
  void leave_unsent(std::uint64_t sequence, Ticket ticket) {
    const auto batch = batches_.find(sequence);
    std::erase(batch->second, ticket);
    if (batch->second.empty()) batches_.erase(batch);
    release(ticket);
  }

  // Tells the stub that a request is cancelled, and how; with `running_only` not before it has
  // started.
  // Returns the batch of a started request that was not cancelled before, if all its requests are
  // cancelled now; else 0 for such a request.
  [[nodiscard]] std::optional<std::uint64_t> cancel(Ticket ticket, bool running_only,
                                                    Cancelled how) {
    const bool started = has_started(ticket);
    if (running_only && !started) return std::nullopt;
    std::uint8_t& cancelled = entries_[ticket].cancelled;
    const std::uint8_t before = cancelled;
    if (before != static_cast<std::uint8_t>(Cancelled::kDropped)) {
      cancelled = static_cast<std::uint8_t>(how);
      store_cell(cells_.cancelled[ticket], cancelled);
    }
    if (!started || before != 0) return std::nullopt;
    const std::uint64_t sequence = entries_[ticket].sequence;
    return all_cancelled(sequence) ? sequence : 0;
  }

  // Tells the stub that responses of a request have left, which it may wait for.
  void passed_on(Ticket ticket, std::uint32_t responses) {
    std::uint32_t& cell = cells_.passed_on[ticket];
    store_cell(cell, load_cell(cell) + responses);
  }

  // Throws MalformedRecord unless the records are those of the requests of a batch at the stub, one
  // of each, and say of each what can be.
  void check(const ResultBatch& batch) const {
    const auto found = batches_.find(batch.sequence);
    const std::string name = "results of batch " + std::to_string(batch.sequence);
    if (found == batches_.end() || found->second.size() != batch.records.size()) {
      throw MalformedRecord(name + ", which is not at the stub");
    }
    std::vector<Ticket> seen;
    for (const RecordView& record : batch.records) {
      const Ticket ticket = record.ticket();
      const bool open = (record.word() & kResponseOpen) != 0;
      if (!is_member(batch, ticket) || (!open && entries_[ticket].state == State::kEarly)) {
        not_running("a result", ticket);
      }
      if ((record.word() & kResponseCancelled) != 0 && entries_[ticket].cancelled == 0) {
        throw MalformedRecord("a cancelled result for ticket " + std::to_string(ticket) +
                              ", which is not cancelled");
      }
      seen.push_back(ticket);
    }
    std::sort(seen.begin(), seen.end());
    const auto twice = std::adjacent_find(seen.begin(), seen.end());
    if (twice != seen.end()) {
      throw MalformedRecord("two results for ticket " + std::to_string(*twice));
    }
  }

  // Takes the step that a checked record says.
  Step end_in_batch(Ticket ticket, std::uint32_t flags) {
    Entry& entry = entries_[ticket];
    if ((flags & kResponseOpen) != 0) {
      if (entry.state == State::kEarly) return Step::kWasEarly;
      entry.state = State::kOpen;
      open_.insert({entry.sequence, ticket});
      return Step::kOpen;
    }
    if ((flags & kResponseRescheduled) != 0) {
      release(ticket);
      return Step::kComesBack;
    }
    return Step::kEnded;
  }

  // Forgets a batch, whose records were all taken; returns its tickets in order.
  std::vector<Ticket> end_batch(std::uint64_t sequence) {
    ended_ = std::max(ended_, sequence);
    return std::move(batches_.extract(sequence).mapped());
  }
  // Tells the stub that the server has another response of a request, whose reader may be slow.
  // Throws MalformedRecord unless the request is at the stub, and has not ended.
  void receive_response(Ticket ticket) {
    if (ticket >= entries_.size() ||
        (entries_[ticket].state != State::kRunning && entries_[ticket].state != State::kOpen)) {
      not_running("a response", ticket);
    }
    std::uint32_t& cell = cells_.received[ticket];
    store_cell(cell, load_cell(cell) + 1);
  }

  // Withdraws all batches that the stub has not begun, if it lets that be done; returns their
  // tickets in order. They stay taken until the stub has come to these batches.
  std::vector<Ticket> withdraw() {
    std::vector<Ticket> tickets;
    if (!claims() || batches_.empty()) return tickets;
    const auto begun = claim(cells_.claimed[0], batches_.rbegin()->first);
    if (!begun) return tickets;
    for (auto batch = batches_.upper_bound(*begun); batch != batches_.end();) {
      // A stub that has answered what it has not begun lies, and gets no favours.
      const bool running =
          std::all_of(batch->second.begin(), batch->second.end(),
                      [this](Ticket ticket) { return entries_[ticket].state == State::kRunning; });
      const auto next = std::next(batch);
      if (running) {
        for (const Ticket ticket : batch->second) entries_[ticket].state = State::kWithdrawn;
        tickets.insert(tickets.end(), batch->second.begin(), batch->second.end());
        withdrawn_.insert(batches_.extract(batch));
      }
      batch = next;
    }
    return tickets;
  }

  // Hears that the stub has come to a batch; returns whether that was withdrawn.
  [[nodiscard]] bool end_withdrawn(std::uint64_t sequence) {
    const auto batch = withdrawn_.find(sequence);
    if (batch == withdrawn_.end()) return false;
    for (const Ticket ticket : batch->second) release(ticket);
    withdrawn_.erase(batch);
    return true;
  }

  // Notes that a response was the last; returns whether the request has left, else its batch has
  // not.
  [[nodiscard]] bool end_response(Ticket ticket) {
    if (open_.erase({entries_[ticket].sequence, ticket}) != 0) return true;
    // Its ticket stays with its batch until that has ended.
    entries_[ticket].state = State::kEarly;
    return false;
  }

  // Takes memory back if the stub is done with it, and then the ticket; returns whether it was.
  // Else that is for `release_kept`.
  [[nodiscard]] bool release_unused(Ticket ticket) {
    if (load_cell(cells_.lent[ticket]) != 0) {
      entries_[ticket].state = State::kKept;
      kept_.insert(ticket);
      return false;
    }
    release(ticket);
    return true;
  }

  // Takes back what stubs are done with by now; returns those tickets.
  std::vector<Ticket> release_kept() {
    std::vector<Ticket> released;
    for (const Ticket ticket : kept_) {
      if (load_cell(cells_.lent[ticket]) == 0) released.push_back(ticket);
    }
    for (const Ticket ticket : released) {
      kept_.erase(ticket);
      release(ticket);
    }
    return released;
  }

  // The same with answers to calls, of which at most so many are looked at, the oldest first.
  std::vector<Ticket> release_answers(std::size_t looks) {
    std::vector<Ticket> released;
    for (looks = std::min(looks, answers_.size()); looks > 0; --looks) {
      const Ticket ticket = answers_.front();
      answers_.pop_front();
      if (load_cell(cells_.lent[ticket]) != 0) {
        answers_.push_back(ticket);
      } else {
        release(ticket);
        released.push_back(ticket);
      }
    }
    return released;
  }

  [[nodiscard]] std::size_t kept() const { return kept_.size(); }
  [[nodiscard]] std::size_t answers() const { return answers_.size(); }
  // Lends the memory of an answer; there must be a free ticket.
  Ticket lend_answer() {
    const Ticket ticket = take();
    entries_[ticket] = {State::kAnswer, 0};
    store_cell<std::uint8_t>(cells_.lent[ticket], 1);
    answers_.push_back(ticket);
    return ticket;
  }

  // The requests that have not ended, those without a batch first.
  [[nodiscard]] std::vector<Member> members() const {
    std::vector<Member> members;
    for (const auto& [sequence, ticket] : open_) members.push_back({0, ticket});
    for (const auto& [sequence, tickets] : batches_) {
      for (const Ticket ticket : tickets) members.push_back({sequence, ticket});
    }
    return members;
  }

  // Takes everything back from a stub that is dead, and said which batch it began last.
  std::vector<Leaving> close(std::uint64_t said) {
    const std::uint64_t started_last = begun(said);
    std::vector<Leaving> leaving;
    for (const Member& member : members()) {
      const bool early = entries_[member.ticket].state == State::kEarly;
      const Left left = early                             ? Left::kEnded
                        : member.sequence <= started_last ? Left::kStarted
                                                          : Left::kUnstarted;
      leaving.push_back({member.ticket, left});
    }
    for (const Ticket ticket : kept_) leaving.push_back({ticket, Left::kEnded});
    for (const Ticket ticket : answers_) leaving.push_back({ticket, Left::kEnded});
    for (const auto& [sequence, tickets] : withdrawn_) {
      for (const Ticket ticket : tickets) leaving.push_back({ticket, Left::kEnded});
    }
    batches_.clear();
    withdrawn_.clear();
    open_.clear();
    kept_.clear();
    answers_.clear();
    for (const Leaving& each : leaving) release(each.ticket);
    return leaving;
  }

 private:
  // The batch that a stub began last, as it says; one that says less than it has answered, since a
  // model has written there, may have begun all.
  [[nodiscard]] std::uint64_t begun(std::uint64_t said) const {
    return said < ended_ ? std::numeric_limits<std::uint64_t>::max() : said;
  }
  [[noreturn]] static void not_running(const char* what, Ticket ticket) {
    throw MalformedRecord(std::string(what) + " for ticket " + std::to_string(ticket) +
                          ", which is not running");
  }

  [[nodiscard]] bool is_member(const ResultBatch& batch, Ticket ticket) const {
    if (ticket >= entries_.size()) return false;
    const Entry& entry = entries_[ticket];
    return entry.sequence == batch.sequence &&
           (entry.state == State::kRunning || entry.state == State::kEarly);
  }

  // True if no request of a batch is left that is not cancelled.
  [[nodiscard]] bool all_cancelled(std::uint64_t sequence) const {
    const auto notified = [this](Ticket ticket) {
      const Entry& entry = entries_[ticket];
      return entry.state == State::kEarly || entry.cancelled != 0;
    };
    if (const auto executing = batches_.find(sequence); executing != batches_.end()) {
      return std::all_of(executing->second.begin(), executing->second.end(), notified);
    }
    auto open = open_.lower_bound({sequence, 0});
    while (open != open_.end() && open->first == sequence && notified(open->second)) ++open;
    return open == open_.end() || open->first != sequence;
  }

  // Returns a free ticket; there must be one.
  Ticket take() {
    if (free_.empty()) {
      entries_.emplace_back();
      return static_cast<Ticket>(entries_.size() - 1);
    }
    const Ticket ticket = free_.back();
    free_.pop_back();
    return ticket;
  }

  void release(Ticket ticket) {
    store_cell<std::uint8_t>(cells_.lent[ticket], 0);
    entries_[ticket] = {};
    free_.push_back(ticket);
  }

  struct Entry {
    State state = State::kFree;
    std::uint64_t sequence = 0;
    std::uint8_t cancelled = 0;  // what the stub was told of it: a Cancelled, or 0
  };

  ControlCells cells_;
  std::vector<Entry> entries_;
  std::vector<Ticket> free_;
  std::map<std::uint64_t, std::vector<Ticket>> batches_;
  std::uint64_t ended_ = 0;  // the highest batch that was answered
  std::map<std::uint64_t, std::vector<Ticket>> withdrawn_;
  std::set<std::pair<std::uint64_t, Ticket>> open_;  // by the batches that they were in
  std::set<Ticket> kept_;
  std::deque<Ticket> answers_;
};

}  // namespace gpubridge
