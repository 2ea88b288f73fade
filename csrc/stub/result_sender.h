// Results on their way to the server: quick ones travel together, none waits for a slow batch.
#pragma once

#include <condition_variable>
#include <mutex>

#include "ipc/control_cells.h"
#include "std.h"

namespace gpubridge::stub {

// Limits of a stub; gpubridge/stub/limits.py says what each means, and their values.
struct StubLimits {
  std::int64_t gathered_ns = 0;
  std::int64_t long_ns = 0;
  std::int64_t watched_batches = 0;
  std::int64_t patience_ns = 0;
  std::int64_t quiet_looks = 0;
  std::size_t kept_leases = 0;
  std::size_t kept_bytes = 0;
  std::uint64_t passed_on_bytes = 0;
};

// Memory in which the server finds results that a dead stub had gathered, as
// gpubridge/transport/control.py describes it.
struct GatheredResults {
  std::uint64_t* word = nullptr;
  std::span<char> message;
};

// Gathers encoded results. The thread that executes adds them; what it gets back it sends. A second
// thread may watch: when a batch takes long, it sends what was gathered before it. The mutex is
// held for moments only; `watch` and `send` may wait, and are called without the interpreter's
// lock.
class ResultSender {
 public:
  ResultSender(int descriptor, const StubLimits& limits)
      : descriptor_(descriptor), limits_(limits) {}

  // Gathers there from now on. A forked child forgets what was gathered: that is its parent's.
  void gather_in(const GatheredResults& gathered) { gathered_ = gathered; }

  // Takes the result of a batch, with the CLOCK_MONOTONIC nanoseconds of its `execute`, the last of
  // its message or not; returns the frame that is to be sent now, until `sent`, or nothing.
  std::string_view add(std::string_view result, std::int64_t started_at, std::int64_t ended_at,
                       bool last);
  void sent() {
    store_cell<std::uint64_t>(*gathered_.word, 0);
    long_frame_ = {};
  }

  // True if batches have taken so long that a thread should watch.
  [[nodiscard]] bool wants_watch() const { return watched_ != 0; }
  // Watches until the channel is closed.
  void watch();

  // Sends a frame that is no longer than a datagram; returns an errno, or 0.
  [[nodiscard]] int send(std::string_view frame, int flags = 0) const;

  // Sends nothing more: for a forked child.
  void disown();

 private:
  // The mutex and what wakes the watcher: another one after a fork.
  struct Guard {
    std::mutex mutex;
    std::condition_variable changed;
  };

  std::string_view take_frame(std::span<char> frame);

  int descriptor_;
  StubLimits limits_;
  std::shared_ptr<Guard> guard_ = std::make_shared<Guard>();
  GatheredResults gathered_;
  std::string long_frame_;  // one that is too long to be gathered
  std::size_t size_ = 0;
  std::uint32_t count_ = 0;
  std::int64_t since_ = 0;
  std::uint64_t taken_ = 0;
  bool gathering_ = false;
  // Only of the thread that executes.
  std::int64_t watched_ = 0;
};

}  // namespace gpubridge::stub
