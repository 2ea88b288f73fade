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
  [[nodiscard]] bool soon_done(bool processors_busy) const {
    return in_flight_ != 0 && in_flight_ < window_ && execute_ns_ != 0 &&
           static_cast<double>(in_flight_) * execute_ns_ <
               (processors_busy ? kBusyWakeNs : kWakeNs);
  }

  // True if requests were withdrawn from it, and it has answered none of the others since: then it
  // gets no more than it may have however long that takes.
  [[nodiscard]] bool stuck() const { return stuck_; }

  // A stub takes requests from now on.
  void open(std::size_t least_window) {
    least_ = least_window;
    execute_ns_ = 0;
    window_ = 1;
    open_ = true;
  }

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
  void withdrawn(std::size_t batches) {
    in_flight_ -= std::min(in_flight_, batches);
    batches_ -= std::min(batches_, batches);
    stuck_ = in_flight_ != 0;
    if (stuck_) window_ = least_;
  }

  void answered(std::size_t batches, std::size_t requests, std::uint64_t execute_ns) {
    // Messages that a stub sent before its end may arrive after it.
    in_flight_ -= std::min(in_flight_, requests);
    batches_ -= std::min(batches_, batches);
    if (requests != 0) {
      stuck_ = false;
      const double mean = static_cast<double>(execute_ns) / static_cast<double>(requests);
      execute_ns_ += (mean - execute_ns_) * (execute_ns_ == 0 ? 1 : kWeight);
    }
    if (!open_) return;
    const double most = stuck_ ? 0 : std::min(kLimit, kAheadNs / (execute_ns_ + 1));
    window_ = std::max(least_, static_cast<std::size_t>(most));
  }

 private:
  // About this much work is sent ahead.
  static constexpr double kAheadNs = 1e6;
  static constexpr double kLimit = 64;
  // Time to wake a process that sleeps, and whose memory is in no cache.
  static constexpr double kWakeNs = 50e3;
  // The same where it has to share a processor.
  static constexpr double kBusyWakeNs = 200e3;
  // Weight of the latest batch in the average.
  static constexpr double kWeight = 0.125;

  std::size_t in_flight_ = 0;
  std::size_t batches_ = 0;
  std::size_t window_ = 0;
  std::size_t least_ = 1;
  bool open_ = false;
  bool stuck_ = false;
  double execute_ns_ = 0;  // of a request, on average; 0 before the first
};

}  // namespace gpubridge
