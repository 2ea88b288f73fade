#include "schedule/dynamic_batcher.h"

namespace gpubridge {

FormingBatch::FormingBatch(std::uint64_t most, const std::vector<std::uint64_t>& preferred)
    : most_(std::max<std::uint64_t>(most, 1)),
      preferred_(preferred.begin(), preferred.end()),
      largest_(preferred.empty() ? most_ : *std::max_element(preferred.begin(), preferred.end())) {}

void FormingBatch::clear() {
  known_ = true;
  count_ = best_ = 0;
  size_ = 0;
  closed_ = false;
  oldest_ = 0;
}

void FormingBatch::offer(const QueuedRequest& request) {
  if (closed_) return;
  const std::uint64_t size = size_ + request.size;
  if (count_ != 0) {
    // No preferred size can be reached any more: what is there already goes.
    if (size > largest_ && best_ == 0) best_ = count_;
    if (size > most_ || request.shape != shape_) {
      closed_ = true;
      return;
    }
    oldest_ = std::min(oldest_, request.arrived);
  } else {
    shape_ = request.shape;
    oldest_ = request.arrived;
  }
  ++count_;
  size_ = size;
  if (preferred_.contains(size)) best_ = count_;
  if (size >= most_) closed_ = true;
}

bool ReleaseOrder::answered(Handle handle) {
  const auto found = states_.find(handle);
  if (found == states_.end()) return false;
  if (found->second == State::kRunning) found->second = State::kAnswered;
  return true;
}

ReleaseOrder::Released ReleaseOrder::release() {
  Released released;
  while (!order_.empty()) {
    const auto found = states_.find(order_.front());
    if (found->second == State::kRunning) break;
    (found->second == State::kAnswered ? released.due : released.dropped).push_back(found->first);
    states_.erase(found);
    order_.pop_front();
  }
  return released;
}

ReleaseOrder::Released ReleaseOrder::abandon() {
  Released released;
  for (const Handle handle : order_) {
    (states_.at(handle) == State::kAnswered ? released.due : released.dropped).push_back(handle);
  }
  order_.clear();
  states_.clear();
  return released;
}

DynamicBatcher::DynamicBatcher(const BatchingSettings& settings)
    : queue_(settings.policy, settings.levels, settings.default_level, settings.policies),
      forming_(settings.max_batch_size, settings.preferred),
      max_delay_(settings.max_delay),
      may_run_ahead_(settings.levels == 0 && settings.policy.most == 0 &&
                     settings.policy.timeout == 0) {
  if (settings.keep_order) order_.emplace();
}

DynamicBatcher::Admission DynamicBatcher::add(const QueuedRequest& request, Nanoseconds now) {
  if (stopped_) return Admission::kStopped;
  // Requests that are late by now no longer count against the queue's limit.
  age(now);
  const PriorityQueue::Added added = queue_.add(request, now);
  if (added == PriorityQueue::Added::kRefused) return Admission::kQueueFull;
  if (forming_.known()) {
    if (added == PriorityQueue::Added::kLast) {
      forming_.offer(request);
    } else {
      forming_.forget();
    }
  }
  return Admission::kAccepted;
}

bool DynamicBatcher::take(Nanoseconds now, std::size_t most, std::vector<Handle>& batch) {
  age(now);
  const std::size_t whole = due(now);
  if (whole == 0) return false;
  const std::size_t count = std::min(whole, most);
  if (count == 0) return true;
  const std::size_t before = batch.size();
  for (std::size_t index = 0; index < count; ++index) batch.push_back(queue_.pop());
  forming_.forget();
  if (order_) {
    for (std::size_t index = before; index < batch.size(); ++index) order_->taken(batch[index]);
  }
  return true;
}

const FormingBatch& DynamicBatcher::look() {
  if (!forming_.known()) {
    forming_.clear();
    queue_.visit([this](const QueuedRequest& request) {
      forming_.offer(request);
      return !forming_.closed();
    });
  }
  return forming_;
}

std::size_t DynamicBatcher::due(Nanoseconds now) {
  const FormingBatch& forming = look();
  if (forming.count() == 0) return 0;
  const bool waited = now - forming.oldest() >= max_delay_;
  if (forming.best() != 0 && !(waited && max_delay_ != 0)) return forming.best();
  return waited || forming.reached() ? forming.count() : 0;
}

std::optional<Nanoseconds> DynamicBatcher::next_wakeup(Nanoseconds now) {
  if (!late_.empty()) return now;
  std::optional<Nanoseconds> next;
  if (const Nanoseconds deadline = queue_.next_deadline(); deadline != 0) next = deadline;
  if (queue_.size() != 0 && due(now) == 0) {
    const Nanoseconds full = forming_.oldest() + max_delay_;
    next = std::min(next.value_or(full), full);
  }
  if (next) next = std::max(*next, now);
  return next;
}

std::vector<Handle> DynamicBatcher::refused(Nanoseconds now) {
  age(now);
  std::vector<Handle> late = std::exchange(late_, {});
  if (order_) {
    for (const Handle handle : late) order_->dropped(handle);
  }
  return late;
}

bool DynamicBatcher::cancel(Handle handle) {
  if (!queue_.remove(handle)) return false;
  forming_.forget();
  if (order_) order_->dropped(handle);
  return true;
}

std::vector<Handle> DynamicBatcher::clear() {
  std::vector<Handle> handles = std::exchange(late_, {});
  while (queue_.size() != 0) handles.push_back(queue_.pop());
  forming_.forget();
  if (order_) {
    for (const Handle handle : handles) order_->dropped(handle);
  }
  return handles;
}

}  // namespace gpubridge
