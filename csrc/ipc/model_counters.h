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

  void add(const Steps& steps, std::uint64_t times) {
    input += times * steps.input;
    infer += times * steps.infer;
    output += times * steps.output;
  }
};

// Requests of executions: how many succeeded, and the durations of all of them.
struct RequestSums {
  std::uint64_t done = 0;
  Duration spent = 0;  // from arrival to answer
  Duration queued = 0;
};

// Calls that a model has made to another: those that have ended, and the sum of their durations.
struct CallCounts {
  std::uint64_t ended = 0;
  Duration spent = 0;

  void add(Duration duration) {
    ++ended;
    spent += duration;
  }
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

// The durations of a request that its model went on with after `execute`: that is infer, too.
inline Observation ended_later(Duration now, Duration arrived, Duration queued, Steps steps) {
  const Duration spent = now - arrived;
  steps.infer = spent - queued - steps.input - steps.output;
  return {now, spent, queued, steps};
}

// Upper bounds of the histogram of durations: ten a decade, from 10 us to 100 s.
inline constexpr std::size_t kDurationBounds = 71;
inline constexpr std::array<Duration, kDurationBounds> kDurations = [] {
  constexpr std::array<Duration, 10> kSteps{100, 125, 160, 200, 250, 320, 400, 500, 640, 800};
  std::array<Duration, kDurationBounds> bounds{};
  Duration scale = 100;
  for (std::size_t index = 0; index < kDurationBounds; ++index) {
    bounds[index] = kSteps[index % kSteps.size()] * scale;
    if (index % kSteps.size() == kSteps.size() - 1) scale *= 10;
  }
  return bounds;
}();

// A request that took long.
struct SlowRequest {
  Observation observed;
  Duration answer = 0;     // from the end of its execution until its response was passed on
  std::string identifier;  // the begin of it

  [[nodiscard]] Duration total() const { return observed.spent + answer; }
};

// The slowest requests of the last minutes: of a period that goes on, and of the one before.
class SlowRequests {
 public:
  static constexpr std::size_t kMost = 20;

  // True if a request that ends now is to be added.
  [[nodiscard]] bool wants(Duration now, Duration total) {
    if (now - begun_ > kPeriod) begin_period(now);
    return current_.size() < kMost || total > current_.front().total();
  }
  void add(SlowRequest request) {
    if (current_.size() == kMost) {
      std::pop_heap(current_.begin(), current_.end(), is_slower);
      current_.pop_back();
    }
    current_.push_back(std::move(request));
    std::push_heap(current_.begin(), current_.end(), is_slower);
  }

  // At most twice as many as a period keeps, in any order.
  [[nodiscard]] std::vector<SlowRequest> latest(Duration now) {
    if (now - begun_ > kPeriod) begin_period(now);
    std::vector<SlowRequest> found = current_;
    found.insert(found.end(), previous_.begin(), previous_.end());
    return found;
  }

 private:
  static bool is_slower(const SlowRequest& one, const SlowRequest& other) {
    return one.total() > other.total();
  }

  static constexpr Duration kPeriod = 300'000'000'000;

  void begin_period(Duration now) {
    previous_ = now - begun_ > 2 * kPeriod ? std::vector<SlowRequest>() : std::move(current_);
    current_.clear();
    begun_ = now;
  }

  Duration begun_ = 0;
  std::vector<SlowRequest> current_;  // a heap: the fastest is in front
  std::vector<SlowRequest> previous_;
};

struct ModelCounters {
  static constexpr std::size_t kMostObservations = 8192;

  std::uint64_t inferences = 0;  // requests that succeeded, each with its batch size
  std::uint64_t executions = 0;  // whatever became of their requests
  Duration last_ended = 0;       // of the last execution; 0 before the first
  RequestSums succeeded;
  Duration failed_spent = 0;
  RequestSums hits;    // answers of the response cache, which are requests that succeeded, too
  RequestSums misses;  // what was looked up in it in vain
  Steps steps;         // of each request that succeeded
  std::array<std::uint64_t, kFailureReasons> failures{};
  std::map<std::uint64_t, BatchCounters> batches;  // by batch size
  Duration answer = 0;                             // of each request that was answered in time
  std::array<std::uint64_t, kDurationBounds + 1> durations{};  // requests; the last have no bound
  SlowRequests slow;
  std::uint64_t copied_bytes = 0;
  std::uint64_t copies = 0;
  bool observes = false;  // whether the latest observations are kept
  std::deque<Observation> observations;

  // Counts executions of one batch size. `size` is the sum of the batch sizes of the requests of
  // one that succeeded, `others` that of those that failed, or go on: `answered` counts these. The
  // steps are summed over the executions, in each of which as many requests succeeded.
  void executed(std::uint64_t count, std::uint64_t size, const RequestSums& requests,
                const Steps& each, std::uint64_t others) {
    executions += count;
    inferences += count * size;
    succeeded.done += requests.done;
    succeeded.spent += requests.spent;
    succeeded.queued += requests.queued;
    // Every request of an execution spends the same time in its steps.
    steps.add(each, requests.done / count);
    BatchCounters& batch = batches[size + others];
    batch.executions += count;
    batch.steps.add(each, 1);
  }

  // Counts a request of a batch size that ended well some time after its execution.
  void answered(std::uint64_t size, const Observation& observed) {
    inferences += size;
    succeeded.done += 1;
    succeeded.spent += observed.spent;
    succeeded.queued += observed.queued;
    steps.add(observed.steps, 1);
    observe(observed);
  }

  void failed(FailureReason reason, Duration spent) {
    ++failures[static_cast<std::size_t>(reason)];
    failed_spent += spent;
  }
  // Counts the durations of a request that succeeded, after its response was passed on; true if it
  // is to be added to the slow ones.
  bool passed_on(const Observation& observed, Duration passing_on) {
    answer += passing_on;
    const Duration total = observed.spent + passing_on;
    const auto bound = std::lower_bound(kDurations.begin(), kDurations.end(), total);
    ++durations[static_cast<std::size_t>(bound - kDurations.begin())];
    return slow.wants(observed.now, total);
  }

  // Counts a request that the response cache answered, or one that it did not, and the time spent.
  void cache_hit(Duration spent) {
    for (RequestSums* sums : {&succeeded, &hits}) {
      sums->done += 1;
      sums->spent += spent;
    }
  }

  void cache_missed(Duration spent) {
    misses.done += 1;
    misses.spent += spent;
  }
  // Counts a copy of tensor data.
  void copied(std::uint64_t nbytes) {
    if (nbytes == 0) return;
    copied_bytes += nbytes;
    ++copies;
  }

  void observe(const Observation& observation) {
    if (!observes) return;
    observations.push_back(observation);
    if (observations.size() > kMostObservations) observations.pop_front();
  }
};

}  // namespace gpubridge
