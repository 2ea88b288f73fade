#include "ipc/messages.h"

#include "little_endian.h"

namespace gpubridge {
namespace {

constexpr char kExecute = 2;
constexpr std::size_t kFrame = 8;
constexpr std::size_t kBatch = 16;
constexpr std::size_t kResult = 48;
constexpr std::size_t kResponses = 16;

std::uint64_t number_at(std::string_view bytes, std::size_t at) {
  return get_number<std::uint64_t>(bytes.data() + at);
}

std::uint32_t count_at(std::string_view bytes, std::size_t at) {
  return get_number<std::uint32_t>(bytes.data() + at);
}

std::string_view take(std::string_view message, std::size_t& at, std::size_t count) {
  return take_bytes<MalformedRecord>(message, at, count, "it ends in the middle of a batch");
}

std::vector<RecordView> read_records(std::string_view message, std::size_t& at, std::size_t count,
                                     bool named) {
  std::vector<RecordView> records;
  for (std::size_t index = 0; index < count; ++index) {
    records.push_back(RecordView::read(message, at, named));
  }
  return records;
}

void check_end(std::string_view message, std::size_t at) {
  if (at != message.size()) {
    throw MalformedRecord(std::to_string(message.size() - at) + " bytes after its end");
  }
}

}  // namespace

void ResultBatch::bound_times(std::uint64_t earliest, std::uint64_t now) {
  started = std::clamp(started, std::min(earliest, now), now);
  called = std::clamp(called, started, now);
  ended = std::clamp(ended, called, now);
}

std::vector<ResultBatch> decode_results(std::string_view message) {
  std::size_t at = 0;
  const std::size_t count = count_at(take(message, at, kFrame), 4);
  std::vector<ResultBatch> batches;
  for (std::size_t index = 0; index < count; ++index) {
    const std::string_view head = take(message, at, kResult);
    ResultBatch batch{number_at(head, 0),  number_at(head, 8),  number_at(head, 16),
                      number_at(head, 24), number_at(head, 32), {}};
    batch.records = read_records(message, at, count_at(head, 40), false);
    batches.push_back(std::move(batch));
  }
  check_end(message, at);
  return batches;
}

ResponsesMessage decode_responses(std::string_view message) {
  std::size_t at = 0;
  const std::string_view head = take(message, at, kResponses);
  ResponsesMessage responses{number_at(head, 8), {}};
  responses.records = read_records(message, at, count_at(head, 4), false);
  check_end(message, at);
  return responses;
}

std::vector<ExecuteBatch> decode_execute(std::string_view message) {
  std::size_t at = 0;
  const std::size_t count = count_at(take(message, at, kFrame), 4);
  std::vector<ExecuteBatch> batches;
  for (std::size_t index = 0; index < count; ++index) {
    const std::string_view head = take(message, at, kBatch);
    ExecuteBatch batch{number_at(head, 0), at, {}};
    batch.records = read_records(message, at, count_at(head, 8), true);
    batches.push_back(std::move(batch));
  }
  return batches;
}

CallsMessage decode_calls(std::string_view message) {
  std::size_t at = 0;
  const std::size_t count = count_at(take(message, at, kFrame), 4);
  const std::string_view batches = take(message, at, count * sizeof(std::uint64_t));
  CallsMessage calls{{}, read_records(message, at, count, true)};
  check_end(message, at);
  for (std::size_t index = 0; index < count; ++index) {
    calls.batches.push_back(number_at(batches, index * sizeof(std::uint64_t)));
  }
  return calls;
}

std::vector<RecordView> decode_call_responses(std::string_view message) {
  std::size_t at = 0;
  const std::size_t count = count_at(take(message, at, kFrame), 4);
  std::vector<RecordView> records = read_records(message, at, count, false);
  check_end(message, at);
  return records;
}

void ExecuteFrame::add(std::uint64_t sequence, std::size_t requests, std::string_view records) {
  const std::size_t at = bytes_.size();
  bytes_.resize(at + kBatch);
  char* end = put_number(bytes_.data() + at, sequence);
  end = put_number(end, static_cast<std::uint32_t>(requests));
  put_number(end, std::uint32_t{0});
  bytes_ += records;
  ++batches_;
}

std::string ExecuteFrame::take(bool alone) {
  std::string head(kFrame, '\0');
  head[0] = kExecute;
  head[1] = alone ? 1 : 0;
  put_number(head.data() + 4, static_cast<std::uint32_t>(batches_));
  batches_ = 0;
  return head + std::exchange(bytes_, {});
}

}  // namespace gpubridge
