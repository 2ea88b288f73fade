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

  // The cells must have the same number of tickets each.
  explicit InFlightRequests(const ControlCells& cells);

  [[nodiscard]] std::size_t free_tickets() const { return free_.size(); }
  [[nodiscard]] std::size_t open_requests() const { return open_.size(); }
  // True if no batch is at the stub.
  [[nodiscard]] bool idle() const { return batches_.empty(); }
  [[nodiscard]] bool holds(std::uint64_t sequence) const { return batches_.contains(sequence); }
  [[nodiscard]] std::uint64_t started() const { return load_cell(cells_.progress[0]); }
  [[nodiscard]] std::uint64_t started_at() const { return load_cell(cells_.progress[1]); }
  // True if the stub lets batches be withdrawn.
  [[nodiscard]] bool claims() const { return load_cell(cells_.claimed[0]) >= kClaims; }

  // Gives the requests of a batch tickets; there must be enough of them.
  std::span<const Ticket> enter(std::uint64_t sequence, std::span<const Entering> requests);
  // Takes a request out of a batch that has not been sent.
  void leave_unsent(std::uint64_t sequence, Ticket ticket);

  // Tells the stub that a request is cancelled; with `running_only` not before it has started.
  // Returns when (ns) the model began what it does, if all of that is cancelled now; 0 where it
  // may have been at any time.
  std::optional<std::uint64_t> cancel(Ticket ticket, bool running_only, bool still_read);
  // Tells the stub that responses of a request have left, so that it may send others.
  void passed_on(Ticket ticket, std::uint32_t responses) {
    std::uint32_t& cell = cells_.passed_on[ticket];
    store_cell(cell, load_cell(cell) + responses);
  }

  // Throws MalformedRecord unless the records are those of the requests of a batch at the stub, one
  // of each, and say of each what can be.
  void check(const ResultBatch& batch) const;
  // Takes the step that a checked record says.
  Step end_in_batch(Ticket ticket, std::uint32_t flags);
  // Forgets a batch, whose records were all taken; returns its tickets in order.
  std::vector<Ticket> end_batch(std::uint64_t sequence) {
    return std::move(batches_.extract(sequence).mapped());
  }
  // Throws MalformedRecord unless a request is at the stub, and has not ended.
  void check_response(Ticket ticket) const;
  // Withdraws all batches that the stub has not begun, if it lets that be done; returns their
  // tickets in order. They stay taken until the stub has come to these batches.
  std::vector<Ticket> withdraw();
  // Hears that the stub has come to a batch; returns whether that was withdrawn.
  bool end_withdrawn(std::uint64_t sequence);
  // Notes that a response was the last; returns whether the request has left, else its batch has
  // not.
  bool end_response(Ticket ticket);

  // Takes memory back if the stub is done with it, and then the ticket; returns whether it was.
  // Else that is for `release_kept`.
  bool release_unused(Ticket ticket);
  // Takes back what stubs are done with by now; returns those tickets.
  std::vector<Ticket> release_kept();
  // The same with answers to calls, of which at most so many are looked at, the oldest first.
  std::vector<Ticket> release_answers(std::size_t looks);
  [[nodiscard]] std::size_t kept() const { return kept_.size(); }
  [[nodiscard]] std::size_t answers() const { return answers_.size(); }
  // Lends the memory of an answer; there must be a free ticket.
  Ticket lend_answer();

  // The requests that have not ended, those without a batch first.
  [[nodiscard]] std::vector<Member> members() const;
  // Takes everything back from a stub that is dead, and whose last batch to start is known.
  std::vector<Leaving> close(std::uint64_t started_last);

 private:
  [[nodiscard]] bool is_member(const ResultBatch& batch, Ticket ticket) const;
  [[nodiscard]] bool has_started(Ticket ticket) const {
    const Entry& entry = entries_[ticket];
    return entry.state == State::kOpen || entry.sequence <= started();
  }
  [[nodiscard]] bool all_cancelled() const;
  void release(Ticket ticket);

  struct Entry {
    State state = State::kFree;
    std::uint64_t sequence = 0;
  };

  ControlCells cells_;
  std::vector<Entry> entries_;
  std::vector<Ticket> free_;
  std::map<std::uint64_t, std::vector<Ticket>> batches_;
  std::map<std::uint64_t, std::vector<Ticket>> withdrawn_;
  std::set<Ticket> open_;
  std::set<Ticket> kept_;
  std::deque<Ticket> answers_;
};

}  // namespace gpubridge
