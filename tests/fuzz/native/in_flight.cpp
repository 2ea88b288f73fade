// Requests at a stub that sends anything: each leaves once, and all tickets come back.
#include "ipc/in_flight.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "fuzz.h"
#include "ipc/messages.h"
#include "little_endian.h"

namespace {

using gpubridge::InFlightRequests;
using gpubridge::Ticket;
using gpubridge::fuzz::expect;

constexpr std::size_t kTickets = 8;

// Requests at a stub whose messages and lease bytes are what the input says.
class Play {
 public:
  explicit Play(gpubridge::fuzz::Input input) : input_(input) {}

  void run() {
    while (!input_.rest().empty()) step();
    std::size_t left = 0;
    for (const auto& leaving : requests_.close(input_.byte())) {
      if (leaving.left == InFlightRequests::Left::kEnded) continue;
      ++left;
      expect(at_stub_[leaving.ticket], "only a request that is at the stub is left by it");
      at_stub_[leaving.ticket] = false;
    }
    expect(left + over_ == entered_, "each request leaves once");
    expect(requests_.free_tickets() == kTickets, "all tickets come back");
    expect(requests_.idle() && requests_.open_requests() == 0, "nothing is left");
  }

 private:
  void step() {
    switch (input_.byte() % 11) {
      case 0:
        enter(input_.byte() % 3 + 1U);
        break;
      case 1:
        complete();
        break;
      case 2:
        respond();
        break;
      case 3:
        lent_[input_.byte() % kTickets] = 0;
        requests_.release_kept();
        break;
      case 4:
        cancel();
        break;
      case 5:
        progress_[0] = input_.byte();
        break;
      case 6:
        withdraw();
        break;
      case 7:
        begin();
        break;
      case 8:
        claimed_[0] = claims();
        honest_ = false;
        break;
      case 9:
        if (requests_.free_tickets() != 0) requests_.lend_answer();
        break;
      default:
        requests_.release_answers(input_.byte() % 4U);
    }
  }

  // The cell in which a stub claims batches, as a hostile one may write it.
  std::uint64_t claims() {
    const std::uint8_t kind = input_.byte();
    const std::uint64_t low = input_.byte();
    const std::uint64_t high = (kind & 2U) != 0 ? low << 55U : 0;
    return ((kind & 1U) != 0 ? gpubridge::kClaims : 0) | high | low;
  }

  // The stub comes to its next batch, which it executes if it can claim it.
  void begin() {
    if (next_ > sequence_) return;
    const std::uint64_t batch = next_++;
    const bool executed = gpubridge::claim(claimed_[0], batch).has_value();
    if (!honest_) return;
    expect(executed != withdrawn_.contains(batch), "a batch is the stub's or the server's");
    if (executed) progress_[0] = batch;
  }

  void withdraw() {
    if (!requests_.claims()) {
      expect(requests_.withdraw().empty(), "only a stub that claims batches gives some back");
      return;
    }
    for (const Ticket ticket : requests_.withdraw()) {
      leave(ticket);
      expect(!honest_ || batch_of_[ticket] >= next_, "what is begun is not withdrawn");
      withdrawn_.insert(batch_of_[ticket]);
      expect(!requests_.holds(batch_of_[ticket]), "a withdrawn batch is no longer at the stub");
    }
  }

  void enter(std::size_t count) {
    if (count > requests_.free_tickets()) return;
    const std::vector<InFlightRequests::Entering> entering(count, {true, 0});
    for (const Ticket ticket : requests_.enter(++sequence_, entering)) {
      at_stub_[ticket] = true;
      batch_of_[ticket] = sequence_;
    }
    entered_ += count;
  }

  // A record of no tensors.
  void add_record(std::string& message) {
    gpubridge::RecordParts parts;
    parts.ticket = input_.byte() % (kTickets + 1);
    parts.word = input_.byte() % 32;
    parts.append_to(message);
  }

  void complete() {
    std::string message(56, '\0');
    const std::size_t count = input_.byte() % 4;
    gpubridge::put_number(message.data() + 4, std::uint32_t{1});
    gpubridge::put_number(message.data() + 8, std::uint64_t{input_.byte()});
    gpubridge::put_number(message.data() + 48, static_cast<std::uint32_t>(count));
    for (std::size_t index = 0; index < count; ++index) add_record(message);
    try {
      for (const auto& batch : gpubridge::decode_results(message)) end_batch(batch);
    } catch (const gpubridge::MalformedRecord&) {
      return;
    }
  }

  void end_batch(const gpubridge::ResultBatch& batch) {
    const std::size_t free = requests_.free_tickets();
    if (requests_.end_withdrawn(batch.sequence)) {
      expect(withdrawn_.contains(batch.sequence), "only what was withdrawn is skipped");
      expect(requests_.free_tickets() > free, "its tickets come back");
      expect(!requests_.end_withdrawn(batch.sequence), "once");
      return;
    }
    requests_.check(batch);
    note_answer(batch.sequence);
    for (const auto& record : batch.records) {
      using Step = InFlightRequests::Step;
      const Step step = requests_.end_in_batch(record.ticket(), record.word());
      if (step == Step::kEnded || step == Step::kComesBack) leave(record.ticket());
      if (step == Step::kEnded || step == Step::kWasEarly)
        static_cast<void>(requests_.release_unused(record.ticket()));
    }
    expect(requests_.end_batch(batch.sequence).size() == batch.records.size(),
           "a batch ends with all its requests");
  }

  void respond() {
    std::string message(16, '\0');
    gpubridge::put_number(message.data() + 4, std::uint32_t{1});
    add_record(message);
    try {
      for (const auto& record : gpubridge::decode_responses(message).records) {
        requests_.receive_response(record.ticket());
        note_answer(batch_of_[record.ticket()]);
        if ((record.word() & gpubridge::kResponseOpen) != 0) continue;
        leave(record.ticket());
        if (requests_.end_response(record.ticket())) {
          static_cast<void>(requests_.release_unused(record.ticket()));
        }
      }
    } catch (const gpubridge::MalformedRecord&) {
      return;
    }
  }

  void cancel() {
    const Ticket ticket = input_.byte() % kTickets;
    const bool running_only = input_.byte() % 2 == 0;
    if (!at_stub_[ticket]) return;
    const auto since =
        requests_.cancel(ticket, running_only, InFlightRequests::Cancelled::kDropped);
    expect(!since || cancelled_[ticket] != 0, "who abandons a model has cancelled a request");
    requests_.passed_on(ticket, 1);
  }

  // An honest stub answers what it has begun.
  void note_answer(std::uint64_t batch) { honest_ = honest_ && batch < next_; }

  void leave(Ticket ticket) {
    expect(at_stub_[ticket], "only a request that is at the stub is over");
    at_stub_[ticket] = false;
    ++over_;
  }

  gpubridge::fuzz::Input input_;
  std::array<std::uint8_t, kTickets> lent_{};
  std::array<std::uint8_t, kTickets> cancelled_{};
  std::array<std::uint32_t, kTickets> passed_on_{};
  std::array<std::uint32_t, kTickets> received_{};
  std::array<std::uint64_t, 2> progress_{};
  std::array<std::uint64_t, 1> claimed_{gpubridge::kClaims};
  InFlightRequests requests_{{lent_, cancelled_, passed_on_, received_, progress_, claimed_}};
  std::array<bool, kTickets> at_stub_{};
  std::array<std::uint64_t, kTickets> batch_of_{};
  std::set<std::uint64_t> withdrawn_;
  std::uint64_t next_ = 1;
  bool honest_ = true;  // whether only batches that are begun were claimed
  std::uint64_t sequence_ = 0;
  std::size_t entered_ = 0;
  std::size_t over_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Play(gpubridge::fuzz::Input(data, size)).run();
  return 0;
}
