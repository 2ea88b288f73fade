// The queue before a batch: levels of priority, each with limits on number and time.
#pragma once

#include <list>

#include "std.h"

namespace gpubridge {

// A request, as who queues it names it.
using Handle = std::uint64_t;
// Of any clock that never goes back.
using Nanoseconds = std::int64_t;

// Durations and moments stay below this, so that two of them can be added.
inline constexpr Nanoseconds kLongest = std::int64_t{1} << 62;

Nanoseconds from_microseconds(std::uint64_t microseconds);

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
                std::map<std::uint64_t, QueuePolicy> policies);
  PriorityQueue(const PriorityQueue&) = delete;
  PriorityQueue& operator=(const PriorityQueue&) = delete;

  // True if requests can become late.
  [[nodiscard]] bool timed() const { return timed_; }
  [[nodiscard]] std::size_t size() const { return entries_.size(); }
  [[nodiscard]] bool contains(Handle handle) const { return entries_.contains(handle); }

  // Refuses a request whose level is full. The handle must not be here yet.
  Added add(const QueuedRequest& request, Nanoseconds now);
  // Puts requests before all others of their levels, in the order given; they are never late.
  void put_back(const std::vector<QueuedRequest>& requests);
  // Takes the first request out; there must be one.
  Handle pop();
  // Takes a request out, wherever it is; returns whether it was here.
  bool remove(Handle handle);
  // Refuses or delays what is late, and appends what it refused to `late`; returns whether the
  // order changed.
  bool age(Nanoseconds now, std::vector<Handle>& late);
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
  void take_out(Entries::iterator entry);

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
