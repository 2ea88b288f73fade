// Prediction of short waits: gpubridge/transport/wait_predictor.py has the same in Python, and says
// why.
#pragma once

#include "std.h"

namespace gpubridge {

// Times of a look in which the processor is offered, in nanoseconds.
struct LookLimits {
  std::int64_t taken = 20'000;       // after more, another thread ran
  std::int64_t contended = 500'000;  // after more, other work than the client of a request ran
};

// Predicts from the last waits whether the next one is short. Times are CLOCK_MONOTONIC
// nanoseconds.
class WaitPredictor {
 public:
  explicit WaitPredictor(std::int64_t awake_ns, const LookLimits& limits = {})
      : limit_(kShort * awake_ns), limits_(limits) {}

  // Begins a wait; returns whether it is likely to be short.
  bool begin(std::int64_t now) {
    since_ = now;
    waiting_ = true;
    return likely() && alone;
  }
  // True if the next wait is likely to be short.
  [[nodiscard]] bool likely() const { return run_ >= kRun; }
  void end(std::int64_t now) {
    waiting_ = false;
    const bool is_short = now - since_ < limit_;
    run_ = is_short ? std::min(run_ + 1, kMost) : std::min(run_, 0);
  }

  // Looks for something to read in a descriptor until there is, or for a time, and offers the
  // processor to others each time; ends when they have had it for long. Returns whether there is
  // something. The caller holds the interpreter's lock, which is given up meanwhile.
  bool stay_awake(int descriptor, std::int64_t nanoseconds);
  // The same, where a wait that did not end meanwhile was in vain.
  bool poll(int descriptor, std::int64_t nanoseconds) {
    const bool readable = stay_awake(descriptor, nanoseconds);
    if (!readable && !taken) give_up();
    return readable;
  }
  // Notes that staying awake was in vain; repeated failures stop it.
  void give_up() {
    if (waiting_) run_ -= kRun;
  }
  // Notes that requests arrive faster than they are executed, so that there are no waits.
  void crowd() { run_ = std::min(run_, 0); }

  bool alone = true;   // whether one request is in flight at a time
  bool taken = false;  // whether another thread used the processor during the last look

 private:
  // As gpubridge/transport/wait_predictor.py has them.
  static constexpr int kRun = 8;
  static constexpr int kPenalty = 200;
  static constexpr int kMost = 4 * kRun;
  static constexpr std::int64_t kShort = 2;

  std::int64_t limit_;
  LookLimits limits_;
  std::int64_t since_ = 0;
  int run_ = 0;
  bool waiting_ = false;
};

}  // namespace gpubridge
