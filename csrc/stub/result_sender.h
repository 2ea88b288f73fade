// Results on their way to the server: quick ones travel together, none waits for a slow batch.
#pragma once

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "ipc/control_cells.h"
#include "ipc/datagrams.h"
#include "little_endian.h"
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

  // Notes the CLOCK_MONOTONIC nanoseconds of a batch's `execute`, whose result is added next.
  void note_time(std::int64_t started_at, std::int64_t ended_at) {
    if (ended_at - started_at > limits_.long_ns) watched_ = limits_.watched_batches;
  }

  // Takes the result of a batch, with the CLOCK_MONOTONIC nanoseconds of its `execute`, the last of
  // its message or not; returns the frame that is to be sent now, until `sent`, or nothing.
  std::string_view add(std::string_view result, std::int64_t started_at, std::int64_t ended_at,
                       bool last) {
    const std::lock_guard lock(guard_->mutex);
    if (count_ == 0) {
      size_ = kHead;
      since_ = started_at;
    }
    ++count_;
    if (result.size() > gathered_.message.size() - size_) {
      long_frame_.assign(gathered_.message.data(), size_);
      long_frame_ += result;
      return take_frame(long_frame_);
    }
    put_bytes(gathered_.message.data() + size_, result);
    size_ += result.size();
    if (last || ended_at - since_ > limits_.gathered_ns) {
      return take_frame(gathered_.message.first(size_));
    }
    store_cell(*gathered_.word, std::uint64_t{count_} << 32U | size_);
    if (watched_ != 0) {
      --watched_;
      if (!std::exchange(gathering_, true)) guard_->changed.notify_one();
    }
    return {};
  }

  void sent() {
    store_cell<std::uint64_t>(*gathered_.word, 0);
    long_frame_ = {};
  }

  // True if batches have taken so long that a thread should watch.
  [[nodiscard]] bool wants_watch() const { return watched_ != 0; }
  // Watches until the channel is closed.
  void watch() {
    const std::shared_ptr<Guard> guard = guard_;
    std::unique_lock lock(guard->mutex);
    std::int64_t quiet = 0;
    while (true) {
      guard->changed.wait(lock, [this] { return gathering_; });
      const std::uint64_t before = taken_;
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::nanoseconds(limits_.patience_ns));
      lock.lock();
      if (count_ == 0) {
        if (++quiet > limits_.quiet_looks) gathering_ = false;
        continue;
      }
      quiet = 0;
      if (taken_ != before) continue;
      // With the lock, so that what is gathered next does not overtake this; hence without waiting.
      const std::uint32_t count = count_;
      const int failed = send(take_frame(gathered_.message.first(size_)), MSG_DONTWAIT);
      if (failed == 0) sent();
      if (failed == EAGAIN) {
        count_ = count;
      } else if (failed != 0) {
        return;
      }
    }
  }

  // Sends a frame that is no longer than a datagram; returns an errno, or 0.
  [[nodiscard]] int send(std::string_view frame, int flags = 0) const {
    return send_datagram(descriptor_, frame, flags) ? 0 : errno;
  }

  // Sends nothing more: for a forked child.
  void disown() {
    descriptor_ = -1;
    // The watching thread, which the child does not have, may hold the mutex, or wait. What it
    // shares stays where it is: its own reference to that never ends.
    guard_ = std::make_shared<Guard>();
    count_ = 0;
  }

 private:
  static constexpr char kResults = 18;
  static constexpr std::size_t kHead = 8;

  // The mutex and what wakes the watcher: another one after a fork.
  struct Guard {
    std::mutex mutex;
    std::condition_variable changed;
  };

  // Writes the head of what is gathered; what is added from now on belongs to another frame.
  std::string_view take_frame(std::span<char> frame) {
    std::fill_n(frame.begin(), kHead, '\0');
    frame.front() = kResults;
    put_number(frame.data() + 4, std::exchange(count_, 0));
    ++taken_;
    return {frame.data(), frame.size()};
  }

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
