// Requests at a stub that sends anything: each leaves once, and all tickets come back.
#include "ipc/in_flight.h"

#include <array>
#include <cstddef>
#include <cstdint>
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
      if (leaving.left == InFlightRequests::Left::kOver) continue;
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
    switch (input_.byte() % 6) {
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
        requests_.settle_kept();
        break;
      case 4:
        cancel();
        break;
      default:
        progress_[0] = input_.byte();
    }
  }

  void enter(std::size_t count) {
    if (count > requests_.free_tickets()) return;
    const std::vector<InFlightRequests::Entering> entering(count, {true, 0});
    for (const Ticket ticket : requests_.enter(++sequence_, entering)) at_stub_[ticket] = true;
    entered_ += count;
  }

  // A record of no tensors.
  void add_record(std::string& message) {
    gpubridge::RecordParts parts;
    parts.ticket = input_.byte() % (kTickets + 1);
    parts.word = input_.byte() % 32;
    const std::size_t at = message.size();
    message.resize(at + parts.size());
    parts.write(message.data() + at);
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
    requests_.check(batch);
    for (const auto& record : batch.records) {
      using Step = InFlightRequests::Step;
      const Step step = requests_.end_in_batch(record.ticket(), record.word());
      if (step == Step::kOver || step == Step::kComesBack) leave(record.ticket());
      if (step == Step::kOver || step == Step::kWasEarly) requests_.settle(record.ticket());
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
        requests_.check_response(record.ticket());
        if ((record.word() & gpubridge::kResponseOpen) != 0) continue;
        leave(record.ticket());
        if (requests_.end_response(record.ticket())) requests_.settle(record.ticket());
      }
    } catch (const gpubridge::MalformedRecord&) {
      return;
    }
  }

  void cancel() {
    const Ticket ticket = input_.byte() % kTickets;
    const bool running_only = input_.byte() % 2 == 0;
    if (!at_stub_[ticket]) return;
    const auto since = requests_.cancel(ticket, running_only, false);
    expect(!since || cancelled_[ticket] != 0, "who abandons a model has cancelled a request");
    requests_.passed_on(ticket, 1);
  }

  void leave(Ticket ticket) {
    expect(at_stub_[ticket], "only a request that is at the stub is over");
    at_stub_[ticket] = false;
    ++over_;
  }

  gpubridge::fuzz::Input input_;
  std::array<std::uint8_t, kTickets> lent_{};
  std::array<std::uint8_t, kTickets> cancelled_{};
  std::array<std::uint32_t, kTickets> passed_on_{};
  std::array<std::uint64_t, 2> progress_{};
  InFlightRequests requests_{{lent_, cancelled_, passed_on_, progress_}};
  std::array<bool, kTickets> at_stub_{};
  std::uint64_t sequence_ = 0;
  std::size_t entered_ = 0;
  std::size_t over_ = 0;
};

void check_messages(std::string_view message) {
  try {
    gpubridge::decode_results(message);
  } catch (const gpubridge::MalformedRecord&) {
  }
  try {
    gpubridge::decode_responses(message);
  } catch (const gpubridge::MalformedRecord&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  if (input.byte() % 4 == 0) {
    check_messages(input.text());
  } else {
    Play(input).run();
  }
  return 0;
}
