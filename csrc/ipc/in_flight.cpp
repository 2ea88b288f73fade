#include "ipc/in_flight.h"

namespace gpubridge {
namespace {

constexpr std::uint8_t kDropped = 1;
constexpr std::uint8_t kStillRead = 2;

[[noreturn]] void not_running(const char* what, Ticket ticket) {
  throw MalformedRecord(std::string(what) + " for ticket " + std::to_string(ticket) +
                        ", which is not running");
}

}  // namespace

InFlightRequests::InFlightRequests(const ControlCells& cells)
    : cells_(cells), entries_(cells.lent.size()) {
  for (std::size_t ticket = entries_.size(); ticket > 0; --ticket) {
    free_.push_back(static_cast<Ticket>(ticket - 1));
  }
}

std::span<const Ticket> InFlightRequests::enter(std::uint64_t sequence,
                                                std::span<const Entering> requests) {
  std::vector<Ticket>& tickets = batches_[sequence];
  for (const Entering& request : requests) {
    const Ticket ticket = free_.back();
    free_.pop_back();
    entries_[ticket] = {State::kRunning, sequence};
    store_cell<std::uint8_t>(cells_.lent[ticket], request.has_memory ? 1 : 0);
    store_cell<std::uint8_t>(cells_.cancelled[ticket], 0);
    store_cell(cells_.passed_on[ticket], 0U - request.unsent);
    tickets.push_back(ticket);
  }
  return tickets;
}

void InFlightRequests::leave_unsent(std::uint64_t sequence, Ticket ticket) {
  const auto batch = batches_.find(sequence);
  std::erase(batch->second, ticket);
  if (batch->second.empty()) batches_.erase(batch);
  release(ticket);
}

bool InFlightRequests::all_cancelled() const {
  const auto notified = [this](Ticket ticket) {
    return entries_[ticket].state == State::kEarly || load_cell(cells_.cancelled[ticket]) != 0;
  };
  const auto executing = batches_.find(started());
  return std::all_of(open_.begin(), open_.end(), notified) &&
         (executing == batches_.end() ||
          std::all_of(executing->second.begin(), executing->second.end(), notified));
}

std::optional<std::uint64_t> InFlightRequests::cancel(Ticket ticket, bool running_only,
                                                      bool still_read) {
  const bool started = has_started(ticket);
  if (running_only && !started) return std::nullopt;
  std::uint8_t& cell = cells_.cancelled[ticket];
  if (load_cell(cell) != kDropped) store_cell(cell, still_read ? kStillRead : kDropped);
  if (!started || !all_cancelled()) return std::nullopt;
  return open_.empty() ? started_at() : 0;
}

bool InFlightRequests::is_member(const ResultBatch& batch, Ticket ticket) const {
  if (ticket >= entries_.size()) return false;
  const Entry& entry = entries_[ticket];
  return entry.sequence == batch.sequence &&
         (entry.state == State::kRunning || entry.state == State::kEarly);
}

void InFlightRequests::check(const ResultBatch& batch) const {
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
    seen.push_back(ticket);
  }
  std::sort(seen.begin(), seen.end());
  const auto twice = std::adjacent_find(seen.begin(), seen.end());
  if (twice != seen.end()) {
    throw MalformedRecord("two results for ticket " + std::to_string(*twice));
  }
}

InFlightRequests::Step InFlightRequests::end_in_batch(Ticket ticket, std::uint32_t flags) {
  Entry& entry = entries_[ticket];
  if ((flags & kResponseOpen) != 0) {
    if (entry.state == State::kEarly) return Step::kWasEarly;
    entry.state = State::kOpen;
    open_.insert(ticket);
    return Step::kOpen;
  }
  if ((flags & kResponseRescheduled) != 0) {
    release(ticket);
    return Step::kComesBack;
  }
  return Step::kEnded;
}

void InFlightRequests::check_response(Ticket ticket) const {
  if (ticket >= entries_.size() ||
      (entries_[ticket].state != State::kRunning && entries_[ticket].state != State::kOpen)) {
    not_running("a response", ticket);
  }
}

std::vector<Ticket> InFlightRequests::withdraw() {
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

bool InFlightRequests::end_withdrawn(std::uint64_t sequence) {
  const auto batch = withdrawn_.find(sequence);
  if (batch == withdrawn_.end()) return false;
  for (const Ticket ticket : batch->second) release(ticket);
  withdrawn_.erase(batch);
  return true;
}

bool InFlightRequests::end_response(Ticket ticket) {
  if (open_.erase(ticket) != 0) return true;
  // Its ticket stays with its batch until that has ended.
  entries_[ticket].state = State::kEarly;
  return false;
}

bool InFlightRequests::release_unused(Ticket ticket) {
  if (load_cell(cells_.lent[ticket]) != 0) {
    entries_[ticket].state = State::kKept;
    kept_.insert(ticket);
    return false;
  }
  release(ticket);
  return true;
}

void InFlightRequests::release(Ticket ticket) {
  store_cell<std::uint8_t>(cells_.lent[ticket], 0);
  entries_[ticket] = {};
  free_.push_back(ticket);
}

std::vector<Ticket> InFlightRequests::release_kept() {
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

std::vector<Ticket> InFlightRequests::release_answers(std::size_t looks) {
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

Ticket InFlightRequests::lend_answer() {
  const Ticket ticket = free_.back();
  free_.pop_back();
  entries_[ticket] = {State::kAnswer, 0};
  store_cell<std::uint8_t>(cells_.lent[ticket], 1);
  answers_.push_back(ticket);
  return ticket;
}

std::vector<InFlightRequests::Member> InFlightRequests::members() const {
  std::vector<Member> members;
  for (const Ticket ticket : open_) members.push_back({0, ticket});
  for (const auto& [sequence, tickets] : batches_) {
    for (const Ticket ticket : tickets) members.push_back({sequence, ticket});
  }
  return members;
}

std::vector<InFlightRequests::Leaving> InFlightRequests::close(std::uint64_t started_last) {
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

}  // namespace gpubridge
