#include "schedule/priority_queue.h"

#include <ranges>

namespace gpubridge {

Nanoseconds from_microseconds(std::uint64_t microseconds) {
  constexpr auto kMost = static_cast<std::uint64_t>(kLongest) / 1000;
  return static_cast<Nanoseconds>(std::min(microseconds, kMost)) * 1000;
}

PriorityQueue::PriorityQueue(const QueuePolicy& policy, std::uint64_t levels,
                             std::uint64_t default_level,
                             std::map<std::uint64_t, QueuePolicy> policies)
    : policy_(policy),
      count_(levels),
      default_level_(levels != 0 ? default_level : 0),
      policies_(levels != 0 ? std::move(policies) : std::map<std::uint64_t, QueuePolicy>()),
      timed_(policy.timeout != 0) {
  for (const auto& [level, own] : policies_) timed_ = timed_ || own.timeout != 0;
}

PriorityQueue::Added PriorityQueue::add(const QueuedRequest& request, Nanoseconds now) {
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

void PriorityQueue::put_back(const std::vector<QueuedRequest>& requests) {
  for (const QueuedRequest& request : std::views::reverse(requests)) {
    const std::uint64_t number = this->number(request);
    Entries& waiting = levels_[number].waiting;
    // It had its turn: time in the queue no longer counts against it.
    waiting.push_front({.request = request, .level = number});
    entries_.emplace(request.handle, waiting.begin());
  }
}

Handle PriorityQueue::pop() {
  Level& level = levels_.begin()->second;
  const auto first = level.waiting.empty() ? level.delayed.begin() : level.waiting.begin();
  const Handle handle = first->request.handle;
  take_out(first);
  return handle;
}

bool PriorityQueue::remove(Handle handle) {
  const auto found = entries_.find(handle);
  if (found == entries_.end()) return false;
  take_out(found->second);
  return true;
}

void PriorityQueue::take_out(Entries::iterator entry) {
  if (entry->deadline != 0) deadlines_.erase({entry->deadline, entry->serial});
  entries_.erase(entry->request.handle);
  const auto level = levels_.find(entry->level);
  (entry->delayed ? level->second.delayed : level->second.waiting).erase(entry);
  if (level->second.waiting.empty() && level->second.delayed.empty()) levels_.erase(level);
}

bool PriorityQueue::age(Nanoseconds now, std::vector<Handle>& late) {
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

}  // namespace gpubridge
