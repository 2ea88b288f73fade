// The default queue and the dynamic batcher: which requests make the next batch.
#pragma once

#include <unordered_set>

#include "schedule/priority_queue.h"
#include "std.h"

namespace gpubridge {

// The batch at the front of the queue, as far as it was looked at. It is kept between calls, so
// that a request which comes last costs one step and not a walk over the whole batch.
class FormingBatch {
 public:
  FormingBatch(std::uint64_t most, const std::vector<std::uint64_t>& preferred)
      : most_(std::max<std::uint64_t>(most, 1)),
        preferred_(preferred.begin(), preferred.end()),
        largest_(preferred.empty() ? most_
                                   : *std::max_element(preferred.begin(), preferred.end())) {}

  // Starts anew, with an empty batch.
  void clear() {
    known_ = true;
    count_ = best_ = 0;
    size_ = 0;
    closed_ = false;
    oldest_ = 0;
  }

  // Looks at the next request in the queue's order.
  void offer(const QueuedRequest& request) {
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

  // True if it is that of the present queue; a change of the queue's front clears it.
  [[nodiscard]] bool known() const { return known_; }
  void forget() { known_ = false; }

  [[nodiscard]] std::size_t count() const { return count_; }
  // Number of requests that make the largest preferred size within reach; 0 if none does.
  [[nodiscard]] std::size_t best() const { return best_; }
  [[nodiscard]] Nanoseconds oldest() const { return oldest_; }
  // True if it cannot grow any more.
  [[nodiscard]] bool closed() const { return closed_; }
  // True if no preferred size lies above.
  [[nodiscard]] bool reached() const { return closed_ || size_ >= largest_; }

 private:
  std::uint64_t most_;
  std::unordered_set<std::uint64_t> preferred_;
  std::uint64_t largest_;
  bool known_ = false;
  std::size_t count_ = 0;
  std::uint64_t size_ = 0;
  std::uint64_t shape_ = 0;
  std::size_t best_ = 0;
  bool closed_ = false;
  Nanoseconds oldest_ = 0;
};

// The order in which outcomes leave, where a model's clients rely on it.
//
// Holds back what is answered early until everything taken before it is answered, too. A request
// keeps its place in the order when it is put back and taken again.
class ReleaseOrder {
 public:
  // Entries that leave the order: outcomes that may go out, and cancelled requests.
  struct Released {
    std::vector<Handle> due;
    std::vector<Handle> dropped;
  };

  // Appends a request to the order, unless it is there.
  void taken(Handle handle) {
    if (states_.try_emplace(handle, State::kRunning).second) order_.push_back(handle);
  }
  // Notes that a request's outcome is there; returns false for one that is not in order.
  [[nodiscard]] bool answered(Handle handle) {
    const auto found = states_.find(handle);
    if (found == states_.end()) return false;
    if (found->second == State::kRunning) found->second = State::kAnswered;
    return true;
  }

  // Notes that a request was cancelled; others wait no longer for it.
  void dropped(Handle handle) {
    const auto found = states_.find(handle);
    if (found != states_.end()) found->second = State::kDropped;
  }
  // Takes out the requests that have an outcome and nothing before them.
  Released release() {
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

  // Forgets the order; the requests that were held back may go out.
  Released abandon() {
    Released released;
    for (const Handle handle : order_) {
      (states_.at(handle) == State::kAnswered ? released.due : released.dropped).push_back(handle);
    }
    order_.clear();
    states_.clear();
    return released;
  }

 private:
  enum class State { kRunning, kAnswered, kDropped };

  std::deque<Handle> order_;
  std::unordered_map<Handle, State> states_;
};

struct BatchingSettings {
  std::uint64_t max_batch_size = 0;  // 0: every request is a batch
  std::vector<std::uint64_t> preferred;
  Nanoseconds max_delay = 0;  // how long a request may wait for others
  bool keep_order = false;    // outcomes go out in the order of the requests
  std::uint64_t levels = 0;
  std::uint64_t default_level = 0;
  QueuePolicy policy;
  std::map<std::uint64_t, QueuePolicy> policies;
};

// Batches of requests that came at about the same time, in Triton's rules; with settings that say
// nothing, one request after the other, which is the default queue.
//
// A batch is due when it has the largest preferred size within reach, when it cannot grow any more
// (the next request does not fit, or has another shape), or when its oldest request has waited for
// `max_delay`. Then, and only then, it may have any size up to `max_batch_size`.
//
// It reads no clock. A request is here from `add` until `take`, `refused`, `cancel` or `clear`
// gives it away, each in exactly one of these ways; a taken one comes back by `put_back`, or is
// reported by `answered` where the order is kept.
class DynamicBatcher {
 public:
  enum class Admission { kAccepted, kQueueFull, kStopped };

  explicit DynamicBatcher(const BatchingSettings& settings)
      : queue_(settings.policy, settings.levels, settings.default_level, settings.policies),
        forming_(settings.max_batch_size, settings.preferred),
        max_delay_(settings.max_delay),
        may_run_ahead_(settings.levels == 0 && settings.policy.most == 0 &&
                       settings.policy.timeout == 0) {
    if (settings.keep_order) order_.emplace();
  }

  // Requests that were not taken, those included that `refused` is about to give away.
  [[nodiscard]] std::size_t pending() const { return queue_.size() + late_.size(); }
  [[nodiscard]] bool queued(Handle handle) const { return queue_.contains(handle); }

  Admission add(const QueuedRequest& request, Nanoseconds now) {
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

  // Appends the next batch to `batch`, or the `most` that come first of it, and returns true, if it
  // is due.
  [[nodiscard]] bool take(Nanoseconds now, std::size_t most, std::vector<Handle>& batch) {
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

  // The same for an instance that is at another batch, if that takes nothing from it: nothing that
  // comes later could join the batch, overtake it, or be refused if it stayed.
  [[nodiscard]] bool take_ahead(Nanoseconds now, std::size_t most, std::vector<Handle>& batch) {
    return may_run_ahead_ && look().closed() && take(now, most, batch);
  }
  // When a batch becomes due, or a request late, by the mere passing of time.
  [[nodiscard]] std::optional<Nanoseconds> next_wakeup(Nanoseconds now) {
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

  // Gives away the requests whose time in the queue has passed.
  std::vector<Handle> refused(Nanoseconds now) {
    age(now);
    std::vector<Handle> late = std::exchange(late_, {});
    if (order_) {
      for (const Handle handle : late) order_->dropped(handle);
    }
    return late;
  }

  // Gives a request away if it was not taken yet; returns whether that was so.
  [[nodiscard]] bool cancel(Handle handle) {
    if (!queue_.remove(handle)) return false;
    forming_.forget();
    if (order_) order_->dropped(handle);
    return true;
  }

  // Puts requests that were never started before all others of their priority.
  void put_back(const std::vector<QueuedRequest>& requests) {
    queue_.put_back(requests);
    forming_.forget();
  }
  // Hears that a taken request has its outcome; returns what may go out now.
  ReleaseOrder::Released answered(Handle handle) {
    if (!order_ || !order_->answered(handle)) return {.due = {handle}, .dropped = {}};
    return order_->release();
  }
  // Outcomes that waited for a request that was cancelled or refused.
  ReleaseOrder::Released release() { return order_ ? order_->release() : ReleaseOrder::Released{}; }
  // Gives up the order for what was taken.
  ReleaseOrder::Released abandon_order() {
    return order_ ? order_->abandon() : ReleaseOrder::Released{};
  }
  // Accepts nothing from now on.
  void stop() { stopped_ = true; }
  // Gives every request away that was not taken.
  std::vector<Handle> clear() {
    std::vector<Handle> handles = std::exchange(late_, {});
    while (queue_.size() != 0) handles.push_back(queue_.pop());
    forming_.forget();
    if (order_) {
      for (const Handle handle : handles) order_->dropped(handle);
    }
    return handles;
  }

  // Calls `visit` with each handle that was not taken.
  template <typename Visit>
  void visit(Visit&& visit) const {
    for (const Handle handle : late_) visit(handle);
    queue_.visit([&visit](const QueuedRequest& request) {
      visit(request.handle);
      return true;
    });
  }

 private:
  void age(Nanoseconds now) {
    if (queue_.timed() && queue_.age(now, late_)) forming_.forget();
  }
  const FormingBatch& look() {
    if (!forming_.known()) {
      forming_.clear();
      queue_.visit([this](const QueuedRequest& request) {
        forming_.offer(request);
        return !forming_.closed();
      });
    }
    return forming_;
  }

  // Number of requests in the batch to take now; 0 for none.
  std::size_t due(Nanoseconds now) {
    const FormingBatch& forming = look();
    if (forming.count() == 0) return 0;
    const bool waited = now - forming.oldest() >= max_delay_;
    if (forming.best() != 0 && !(waited && max_delay_ != 0)) return forming.best();
    return waited || forming.reached() ? forming.count() : 0;
  }

  PriorityQueue queue_;
  FormingBatch forming_;
  Nanoseconds max_delay_;
  std::optional<ReleaseOrder> order_;
  bool may_run_ahead_;
  bool stopped_ = false;
  std::vector<Handle> late_;
};

}  // namespace gpubridge
