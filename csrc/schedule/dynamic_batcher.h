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
  FormingBatch(std::uint64_t most, const std::vector<std::uint64_t>& preferred);

  // Starts anew, with an empty batch.
  void clear();
  // Looks at the next request in the queue's order.
  void offer(const QueuedRequest& request);

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
  bool answered(Handle handle);
  // Notes that a request was cancelled; others wait no longer for it.
  void dropped(Handle handle) {
    const auto found = states_.find(handle);
    if (found != states_.end()) found->second = State::kDropped;
  }
  // Takes out the requests that have an outcome and nothing before them.
  Released release();
  // Forgets the order; the requests that were held back may go out.
  Released abandon();

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

  explicit DynamicBatcher(const BatchingSettings& settings);

  // Requests that were not taken, those included that `refused` is about to give away.
  [[nodiscard]] std::size_t pending() const { return queue_.size() + late_.size(); }
  [[nodiscard]] bool queued(Handle handle) const { return queue_.contains(handle); }

  Admission add(const QueuedRequest& request, Nanoseconds now);
  // Appends the next batch to `batch`, or the `most` that come first of it, and returns true, if it
  // is due.
  bool take(Nanoseconds now, std::size_t most, std::vector<Handle>& batch);
  // The same for an instance that is at another batch, if that takes nothing from it: nothing that
  // comes later could join the batch, overtake it, or be refused if it stayed.
  bool take_ahead(Nanoseconds now, std::size_t most, std::vector<Handle>& batch) {
    return may_run_ahead_ && look().closed() && take(now, most, batch);
  }
  // When a batch becomes due, or a request late, by the mere passing of time.
  std::optional<Nanoseconds> next_wakeup(Nanoseconds now);
  // Gives away the requests whose time in the queue has passed.
  std::vector<Handle> refused(Nanoseconds now);
  // Gives a request away if it was not taken yet; returns whether that was so.
  bool cancel(Handle handle);
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
  std::vector<Handle> clear();

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
  const FormingBatch& look();
  // Number of requests in the batch to take now; 0 for none.
  std::size_t due(Nanoseconds now);

  PriorityQueue queue_;
  FormingBatch forming_;
  Nanoseconds max_delay_;
  std::optional<ReleaseOrder> order_;
  bool may_run_ahead_;
  bool stopped_ = false;
  std::vector<Handle> late_;
};

}  // namespace gpubridge
