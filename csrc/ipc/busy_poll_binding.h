// Busy polling: keeps the event loop awake for a moment between short messages.
#pragma once

#include "clock.h"
#include "ipc/wait_predictor.h"
#include "python_object.h"

namespace gpubridge {

// Learns how long one stub and its clients take, and polls if that is short.
//
// While a callback is scheduled, the loop polls for events without sleeping; events of other
// connections are handled as usual. Each turn offers the processor to other threads.
class BusyPoll {
 public:
  // `call_soon` schedules a callback in the next turn of the event loop; `events` is readable while
  // the loop has events, -1 where it does not tell. `awake_ns`: the longest time to poll; 0: never.
  // `clock` gives the time in tests; None for the system's.
  BusyPoll(nb::object call_soon, int events, std::int64_t awake_ns, const LookLimits& limits,
           nb::object clock)
      : call_soon_(std::move(call_soon)),
        events_(events),
        awake_ns_(awake_ns),
        answers_(awake_ns, limits),
        requests_(awake_ns, limits),
        clock_(std::move(clock)) {}
  BusyPoll(const BusyPoll&) = delete;
  BusyPoll& operator=(const BusyPoll&) = delete;

  // Records a batch sent to the stub; `alone`: the stub was idle. Returns whether the next batch is
  // likely to follow soon after the response, alone again.
  bool sent(bool alone);
  // Records that the stub continues its batch: it got the response to its BLS call.
  void resumed() { begin(answers_, now()); }
  // Records a message by which the stub pauses: it waits for a BLS call.
  void paused() { answers_.end(now()); }
  // Records that the stub has completed all its batches.
  void answered();
  // A turn of the event loop that is kept awake.
  void turn();

 private:
  [[nodiscard]] std::int64_t now() const {
    return clock_.is_none() ? monotonic_ns() : nb::cast<std::int64_t>(clock_());
  }
  void begin(WaitPredictor& waits, std::int64_t now);
  void call_turn() { call_soon_(nb::find(this).attr("turn")); }

  nb::object call_soon_;
  int events_;
  std::int64_t awake_ns_;
  WaitPredictor answers_;
  WaitPredictor requests_;
  nb::object clock_;
  WaitPredictor* waits_ = &answers_;  // that of the wait in which the loop stays awake
  std::int64_t until_ = 0;
  bool on_ = false;
};

}  // namespace gpubridge
