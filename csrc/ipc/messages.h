// The messages that carry requests and responses between server and stub, as the server sees them.
// Their layout is described in gpubridge/transport/messages.py.
#pragma once

#include "ipc/records.h"
#include "std.h"

namespace gpubridge {

inline constexpr std::uint32_t kResponseError = 1;
inline constexpr std::uint32_t kResponseCancelled = 2;
inline constexpr std::uint32_t kResponseOpen = 4;
inline constexpr std::uint32_t kResponseEmpty = 8;
inline constexpr std::uint32_t kResponseRescheduled = 16;

// A batch of a RESULTS message. Times are CLOCK_MONOTONIC nanoseconds.
struct ResultBatch {
  std::uint64_t sequence = 0;
  std::uint64_t started = 0;
  std::uint64_t called = 0;
  std::uint64_t ended = 0;
  std::uint64_t copied = 0;  // bytes
  std::vector<RecordView> records;

  // Puts the times, which a stub may say anything of, in their order between two moments.
  void bound_times(std::uint64_t earliest, std::uint64_t now);
};

struct ResponsesMessage {
  std::uint64_t copied = 0;  // bytes
  std::vector<RecordView> records;
};

// The calls of a CALL message.
struct CallsMessage {
  std::vector<std::uint64_t> batches;  // of each call the batch of the requests that it is made for
  std::vector<RecordView> records;
};

// A batch of an EXECUTE message; its records begin at `first`.
struct ExecuteBatch {
  std::uint64_t sequence = 0;
  std::size_t first = 0;
  std::vector<RecordView> records;
};

// All throw MalformedRecord where a length or a count does not fit. The message must outlive what
// they return.
std::vector<ResultBatch> decode_results(std::string_view message);
ResponsesMessage decode_responses(std::string_view message);
std::vector<ExecuteBatch> decode_execute(std::string_view message);
// Of a message with calls, or with the responses to them (gpubridge/transport/calls.py).
CallsMessage decode_calls(std::string_view message);
std::vector<RecordView> decode_call_responses(std::string_view message);

// Encoded requests of batches, until they are sent as one EXECUTE message.
class ExecuteFrame {
 public:
  [[nodiscard]] std::size_t batches() const { return batches_; }
  [[nodiscard]] std::size_t size() const { return bytes_.size(); }

  // Appends a batch; `records` are its encoded requests.
  void add(std::uint64_t sequence, std::size_t requests, std::string_view records);
  // Returns the message, and begins another; `alone` says that requests come one after the other.
  std::string take(bool alone);

 private:
  std::size_t batches_ = 0;
  std::string bytes_;
};

}  // namespace gpubridge
