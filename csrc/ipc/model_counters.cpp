#include "ipc/model_counters.h"

namespace gpubridge {
namespace {

constexpr std::size_t kMostObservations = 8192;

void add(Steps& sum, const Steps& steps, std::uint64_t times) {
  sum.input += times * steps.input;
  sum.infer += times * steps.infer;
  sum.output += times * steps.output;
}

}  // namespace

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

void ModelCounters::failed(FailureReason reason, Duration spent) {
  ++failures[static_cast<std::size_t>(reason)];
  failed_spent += spent;
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
