// Counters of one model version: the figures of the statistics extension.
#pragma once

#include "std.h"

namespace gpubridge {

// Durations and moments in nanoseconds; what stubs say of them is not believed, only added up, so
// sums may wrap around.
using Duration = std::uint64_t;

// Triton's reasons for which a request fails, as they stand in its metrics.
enum class FailureReason : std::uint8_t { kOther, kBackend, kCanceled, kRejected };
inline constexpr std::size_t kFailureReasons = 4;

// The steps of an execution.
struct Steps {
  Duration input = 0;
  Duration infer = 0;
  Duration output = 0;
};

// Requests of executions: how many succeeded, and the durations of all of them.
struct RequestSums {
  std::uint64_t done = 0;
  Duration spent = 0;  // from arrival to answer
  Duration queued = 0;
};

struct BatchCounters {
  std::uint64_t executions = 0;
  Steps steps;
};

// Durations of one request.
struct Observation {
  Duration now = 0;
  Duration spent = 0;
  Duration queued = 0;
  Steps steps;
};

struct ModelCounters {
  std::uint64_t inferences = 0;  // requests, each with its batch size
  std::uint64_t executions = 0;
  Duration last_ended = 0;  // of the last execution; 0 before the first
  RequestSums succeeded;
  Duration failed_spent = 0;
  Steps steps;  // of each request that succeeded
  std::array<std::uint64_t, kFailureReasons> failures{};
  std::map<std::uint64_t, BatchCounters> batches;  // by batch size
  std::uint64_t copied_bytes = 0;
  std::uint64_t copies = 0;
  bool observes = false;  // whether the latest observations are kept
  std::deque<Observation> observations;

  // Counts executions of one batch size. `size` is the sum of the batch sizes of the requests of
  // one that are over, `going_on` that of the others, which `answered` counts. The steps are summed
  // over the executions, in each of which as many requests succeeded.
  void executed(std::uint64_t count, std::uint64_t size, const RequestSums& requests,
                const Steps& each, std::uint64_t going_on);
  // Counts a request of a batch size that ended well some time after its execution.
  void answered(std::uint64_t size, Duration spent, Duration queued, const Steps& each);
  void failed(FailureReason reason, Duration spent);
  // Counts a copy of tensor data.
  void copied(std::uint64_t nbytes);
  void observe(const Observation& observation);
};

}  // namespace gpubridge
