// The queue before a batch: levels of priority, each with limits on number and time.
#pragma once

#include <list>
#include <ranges>

#include "std.h"

namespace gpubridge {

// A request, as who queues it names it.
using Handle = std::uint64_t;
// Of any clock that never goes back.
using Nanoseconds = std::int64_t;

// Durations and moments stay below this, so that two of them can be added.
inline constexpr Nanoseconds kLongest = std::int64_t{1} << 62;

inline Nanoseconds from_microseconds(std::uint64_t microseconds) {
  constexpr auto kMost = static_cast<std::uint64_t>(kLongest) / 1000;
  return static_cast<Nanoseconds>(std::min(microseconds, kMost)) * 1000;
}

// The limits of one level.
struct QueuePolicy {
  bool delays_late = false;     // late requests go behind the others, instead of being refused
  Nanoseconds timeout = 0;      // 0: none, and then requests cannot set one either
  bool may_be_shorter = false;  // a request may ask for less
  std::uint64_t most = 0;       // requests; 0: any number
};

// Inputs of the queue's rules.
struct QueuedRequest {
  Handle handle = 0;
  std::uint64_t size = 1;      // its batch size
  std::uint64_t shape = 0;     // only requests of one shape share a batch
  std::uint64_t priority = 0;  // 1 is the highest; a level that does not exist is the default
  Nanoseconds timeout = 0;     // what it asks for; 0: nothing
  Nanoseconds arrived = 0;
};

// Requests in the order in which they are to be executed. A level is served only while those above
// it are empty; within a level late requests, where they are not refused, come after all others.
class PriorityQueue {
 public:
  enum class Added { kRefused, kLast, kBeforeOthers };

  // `levels` is 0 for a queue without priorities. `policies` are those of levels with their own.
  PriorityQueue(const QueuePolicy& policy, std::uint64_t levels, std::uint64_t default_level,
                std::map<std::uint64_t, QueuePolicy> policies)
      : policy_(policy),
        count_(levels),
        default_level_(levels != 0 ? default_level : 0),
        policies_(levels != 0 ? std::move(policies) : std::map<std::uint64_t, QueuePolicy>()),
        timed_(policy.timeout != 0) {
    for (const auto& [level, own] : policies_) timed_ = timed_ || own.timeout != 0;
  }

  PriorityQueue(const PriorityQueue&) = delete;
  PriorityQueue& operator=(const PriorityQueue&) = delete;

  // True if requests can become late.
  [[nodiscard]] bool timed() const { return timed_; }
  [[nodiscard]] std::size_t size() const { return entries_.size(); }
  [[nodiscard]] bool contains(Handle handle) const { return entries_.contains(handle); }

  // Refuses a request whose level is full. The handle must not be here yet.
  Added add(const QueuedRequest& request, Nanoseconds now) {
    const std::uint64_t number = this->number(request);
    const QueuePolicy& policy = this->policy(number);
    const auto known = levels_.find(number);
    if (policy.most != 0 && known != levels_.end() &&
        known->second.waiting.size() + known->second.delayed.size() >= policy.most) {
      return Added::kRefused;
    }
    Level& level = known == levels_.end() ? levels_[number] : known->second;
    level.waiting.push_back({.request = request, .level = number});
    const auto entry = std::prev(level.waiting.end());
    entries_.emplace(request.handle, entry);
    if (policy.timeout != 0) {
      const bool shorter =
          policy.may_be_shorter && request.timeout > 0 && request.timeout < policy.timeout;
      entry->deadline = now + (shorter ? request.timeout : policy.timeout);
      entry->serial = ++serial_;
      deadlines_.emplace(std::pair(entry->deadline, entry->serial), entry);
    }
    const bool last = level.delayed.empty() && levels_.rbegin()->first == number;
    return last ? Added::kLast : Added::kBeforeOthers;
  }

  // Puts requests before all others of their levels, in the order given; they are never late.
  void put_back(const std::vector<QueuedRequest>& requests) {
    for (const QueuedRequest& request : std::views::reverse(requests)) {
      const std::uint64_t number = this->number(request);
      Entries& waiting = levels_[number].waiting;
      // It had its turn: time in the queue no longer counts against it.
      waiting.push_front({.request = request, .level = number});
      entries_.emplace(request.handle, waiting.begin());
    }
  }

  // Takes the first request out; there must be one.
  Handle pop() {
    Level& level = levels_.begin()->second;
    const auto first = level.waiting.empty() ? level.delayed.begin() : level.waiting.begin();
    const Handle handle = first->request.handle;
    take_out(first);
    return handle;
  }

  // Takes a request out, wherever it is; returns whether it was here.
  [[nodiscard]] bool remove(Handle handle) {
    const auto found = entries_.find(handle);
    if (found == entries_.end()) return false;
    take_out(found->second);
    return true;
  }

  // Refuses or delays what is late, and appends what it refused to `late`; returns whether the
  // order changed.
  [[nodiscard]] bool age(Nanoseconds now, std::vector<Handle>& late) {
    bool changed = false;
    while (!deadlines_.empty() && deadlines_.begin()->first.first <= now) {
      const auto entry = deadlines_.begin()->second;
      changed = true;
      if (policy(entry->level).delays_late) {
        deadlines_.erase(deadlines_.begin());
        Level& level = levels_[entry->level];
        entry->deadline = 0;
        entry->delayed = true;
        level.delayed.splice(level.delayed.end(), level.waiting, entry);
      } else {
        late.push_back(entry->request.handle);
        take_out(entry);
      }
    }
    return changed;
  }

  // Returns when `age` has something to do; 0 for never.
  [[nodiscard]] Nanoseconds next_deadline() const {
    return deadlines_.empty() ? 0 : deadlines_.begin()->first.first;
  }

  // Calls `visit` with each request in order until it returns false.
  template <typename Visit>
  void visit(Visit&& visit) const {
    for (const auto& [number, level] : levels_) {
      for (const Entries* entries : {&level.waiting, &level.delayed}) {
        for (const Entry& entry : *entries) {
          if (!visit(entry.request)) return;
        }
      }
    }
  }

 private:
  struct Entry {
    QueuedRequest request;
    std::uint64_t level = 0;
    Nanoseconds deadline = 0;  // 0: none any more
    std::uint64_t serial = 0;  // tells deadlines at the same time apart
    bool delayed = false;
  };
  using Entries = std::list<Entry>;
  // There is none that is empty: clients choose the numbers.
  struct Level {
    Entries waiting;
    Entries delayed;
  };

  [[nodiscard]] std::uint64_t number(const QueuedRequest& request) const {
    return request.priority >= 1 && request.priority <= count_ ? request.priority : default_level_;
  }
  [[nodiscard]] const QueuePolicy& policy(std::uint64_t level) const {
    const auto own = policies_.find(level);
    return own == policies_.end() ? policy_ : own->second;
  }
  void take_out(Entries::iterator entry) {
    if (entry->deadline != 0) deadlines_.erase({entry->deadline, entry->serial});
    entries_.erase(entry->request.handle);
    const auto level = levels_.find(entry->level);
    (entry->delayed ? level->second.delayed : level->second.waiting).erase(entry);
    if (level->second.waiting.empty() && level->second.delayed.empty()) levels_.erase(level);
  }

  QueuePolicy policy_;
  std::uint64_t count_;
  std::uint64_t default_level_;
  std::map<std::uint64_t, QueuePolicy> policies_;
  bool timed_;
  std::map<std::uint64_t, Level> levels_;
  std::unordered_map<Handle, Entries::iterator> entries_;
  std::map<std::pair<Nanoseconds, std::uint64_t>, Entries::iterator> deadlines_;
  std::uint64_t serial_ = 0;
};

}  // namespace gpubridge
