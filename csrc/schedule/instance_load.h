// Number of requests that a stub has and may have: enough that it never waits, and few enough that
// little is lost if it dies.
#pragma once

#include "std.h"

namespace gpubridge {

// The load of one model instance, whose stubs come one after the other.
class InstanceLoad {
 public:
  [[nodiscard]] std::size_t in_flight() const { return in_flight_; }
  [[nodiscard]] std::size_t batches() const { return batches_; }
  // Requests that it may have at once; 0 while it takes none.
  [[nodiscard]] std::size_t window() const { return window_; }
  // Requests, or batches of them, that it may have however long they take.
  [[nodiscard]] std::size_t least_window() const { return least_; }
  // True if it has something to do, and is likely to be done with all of it before another process
  // would be awake; with `processors_busy`, before that would be scheduled.
  [[nodiscard]] bool soon_done(bool processors_busy) const;
  // True if requests were withdrawn from it, and it has answered none of the others since: then it
  // gets no more than it may have however long that takes.
  [[nodiscard]] bool stuck() const { return stuck_; }

  // A stub takes requests from now on.
  void open(std::size_t least_window);
  // There is no stub any more, and nothing at one.
  void close() {
    in_flight_ = batches_ = window_ = 0;
    open_ = stuck_ = false;
  }

  void sent(std::size_t requests) {
    ++batches_;
    in_flight_ += requests;
  }
  // So many batches of one request each are not at the stub any more.
  void withdrawn(std::size_t batches);
  void answered(std::size_t batches, std::size_t requests, std::uint64_t execute_ns);

 private:
  std::size_t in_flight_ = 0;
  std::size_t batches_ = 0;
  std::size_t window_ = 0;
  std::size_t least_ = 1;
  bool open_ = false;
  bool stuck_ = false;
  double execute_ns_ = 0;  // of a request, on average; 0 before the first
};

}  // namespace gpubridge
