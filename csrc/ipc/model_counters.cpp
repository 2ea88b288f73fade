#include "ipc/model_counters.h"

namespace gpubridge {
namespace {

constexpr std::size_t kMostObservations = 8192;

void add(Steps& sum, const Steps& steps, std::uint64_t times) {
  sum.input += times * steps.input;
  sum.infer += times * steps.infer;
  sum.output += times * steps.output;
}

bool is_slower(const SlowRequest& one, const SlowRequest& other) {
  return one.total() > other.total();
}

}  // namespace

void SlowRequests::begin_period(Duration now) {
  previous_ = now - begun_ > 2 * kPeriod ? std::vector<SlowRequest>() : std::move(current_);
  current_.clear();
  begun_ = now;
}

void SlowRequests::add(SlowRequest request) {
  if (current_.size() == kMost) {
    std::pop_heap(current_.begin(), current_.end(), is_slower);
    current_.pop_back();
  }
  current_.push_back(std::move(request));
  std::push_heap(current_.begin(), current_.end(), is_slower);
}

std::vector<SlowRequest> SlowRequests::latest(Duration now) {
  if (now - begun_ > kPeriod) begin_period(now);
  std::vector<SlowRequest> found = current_;
  found.insert(found.end(), previous_.begin(), previous_.end());
  return found;
}

void ModelCounters::executed(std::uint64_t count, std::uint64_t size, const RequestSums& requests,
                             const Steps& each, std::uint64_t going_on) {
  executions += count;
  inferences += count * size;
  succeeded.done += requests.done;
  succeeded.spent += requests.spent;
  succeeded.queued += requests.queued;
  // Every request of an execution spends the same time in its steps.
  add(steps, each, requests.done / count);
  BatchCounters& batch = batches[size + going_on];
  batch.executions += count;
  add(batch.steps, each, 1);
}

void ModelCounters::answered(std::uint64_t size, Duration spent, Duration queued,
                             const Steps& each) {
  inferences += size;
  succeeded.done += 1;
  succeeded.spent += spent;
  succeeded.queued += queued;
  add(steps, each, 1);
}

void ModelCounters::cache_hit(Duration spent) {
  for (RequestSums* sums : {&succeeded, &hits}) {
    sums->done += 1;
    sums->spent += spent;
  }
}

void ModelCounters::cache_missed(Duration spent) {
  misses.done += 1;
  misses.spent += spent;
}

void ModelCounters::copied(std::uint64_t nbytes) {
  if (nbytes == 0) return;
  copied_bytes += nbytes;
  ++copies;
}

void ModelCounters::observe(const Observation& observation) {
  if (!observes) return;
  observations.push_back(observation);
  if (observations.size() > kMostObservations) observations.pop_front();
}

}  // namespace gpubridge
