// The order in which outcomes leave, where a model's clients rely on it.
#pragma once

#include "schedule/priority_queue.h"
#include "std.h"

namespace gpubridge {

// Holds back what is answered early until everything taken before it is answered, too. A request
// keeps its place in the order when it is put back and taken again.
class ReleaseOrder {
 public:
  // Entries that leave the order: outcomes that may go out, and requests whose outcome nobody waits
  // for.
  struct Released {
    std::vector<Handle> due;
    std::vector<Handle> dropped;
  };

  // Appends a request to the order, unless it is there.
  void taken(Handle handle);
  // Notes that a request's outcome is there; returns false for one that is not in order.
  bool answered(Handle handle);
  // Notes that nobody waits for a request's outcome; others wait no longer for it.
  void dropped(Handle handle);
  // Takes out the requests that have an outcome and nothing before them.
  Released release();
  // Forgets the order; the requests that were held back may go out.
  Released abandon();

 private:
  enum class State { kRunning, kAnswered, kDropped };

  std::deque<Handle> order_;
  std::unordered_map<Handle, State> states_;
};

}  // namespace gpubridge
