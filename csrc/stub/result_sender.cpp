#include "stub/result_sender.h"

#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "little_endian.h"

namespace gpubridge::stub {
namespace {

constexpr char kResults = 18;
constexpr std::size_t kHead = 8;
// Of gpubridge.transport.channel: half of the longest datagram.
constexpr std::size_t kMuch = 64 * 1024;
// Results are gathered for so long: the work of a few small batches.
constexpr std::int64_t kTogetherNs = 100'000;
// A batch that ran longer than this makes a watch worth its price, for so many batches after it:
// any may be held up once.
constexpr std::int64_t kLongNs = 1'000'000;
constexpr int kWatchedBatches = 1000;
// After this a result is sent although the batch that follows it still runs.
constexpr std::chrono::milliseconds kPatience{2};
// The watching thread sleeps for good only after so many looks in vain: waking it costs more.
constexpr int kQuietLooks = 50;

}  // namespace

std::optional<std::string> ResultSender::add(std::string_view result, std::int64_t started_at,
                                             std::int64_t ended_at, bool last) {
  if (ended_at - started_at > kLongNs) watched_ = kWatchedBatches;
  const std::lock_guard lock(guard_->mutex);
  if (count_ == 0) {
    gathered_.assign(kHead, '\0');
    since_ = started_at;
  }
  gathered_ += result;
  ++count_;
  if (last || ended_at - since_ > kTogetherNs || gathered_.size() > kMuch) {
    finish_frame();
    begin_anew();
    return std::exchange(gathered_, {});
  }
  if (watched_ != 0) {
    --watched_;
    if (!std::exchange(gathering_, true)) guard_->changed.notify_one();
  }
  return std::nullopt;
}

void ResultSender::finish_frame() {
  gathered_.front() = kResults;
  put_number(gathered_.data() + 4, count_);
}

void ResultSender::begin_anew() {
  count_ = 0;
  ++taken_;
}

void ResultSender::watch() {
  const std::shared_ptr<Guard> guard = guard_;
  std::unique_lock lock(guard->mutex);
  int quiet = 0;
  while (true) {
    guard->changed.wait(lock, [this] { return gathering_; });
    const std::uint64_t before = taken_;
    lock.unlock();
    std::this_thread::sleep_for(kPatience);
    lock.lock();
    if (count_ == 0) {
      if (++quiet > kQuietLooks) gathering_ = false;
      continue;
    }
    quiet = 0;
    if (taken_ != before) continue;
    // With the lock, so that what is gathered next does not overtake this; hence without waiting.
    finish_frame();
    const int failed = send(gathered_, MSG_DONTWAIT);
    if (failed == 0) begin_anew();
    if (failed != 0 && failed != EAGAIN) return;
  }
}

int ResultSender::send(std::string_view frame, int flags) const {
  ssize_t sent = -1;
  do {
    sent = ::send(descriptor_, frame.data(), frame.size(), flags | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? errno : 0;
}

void ResultSender::disown() {
  descriptor_ = -1;
  // The watching thread, which the child does not have, may hold the mutex, or wait. What it shares
  // stays where it is: its own reference to that never ends.
  guard_ = std::make_shared<Guard>();
  gathered_.clear();
  count_ = 0;
}

}  // namespace gpubridge::stub
