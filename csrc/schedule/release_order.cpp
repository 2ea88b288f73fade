#include "schedule/release_order.h"

namespace gpubridge {

void ReleaseOrder::taken(Handle handle) {
  if (states_.try_emplace(handle, State::kRunning).second) order_.push_back(handle);
}

bool ReleaseOrder::answered(Handle handle) {
  const auto found = states_.find(handle);
  if (found == states_.end()) return false;
  if (found->second == State::kRunning) found->second = State::kAnswered;
  return true;
}

void ReleaseOrder::dropped(Handle handle) {
  const auto found = states_.find(handle);
  if (found != states_.end()) found->second = State::kDropped;
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

}  // namespace gpubridge
