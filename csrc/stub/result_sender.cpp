#include "stub/result_sender.h"

#include <sys/socket.h>

#include <cerrno>
#include <thread>

#include "little_endian.h"

namespace gpubridge::stub {
namespace {

constexpr char kResults = 18;
constexpr std::size_t kHead = 8;
}  // namespace

std::string_view ResultSender::add(std::string_view result, std::int64_t started_at,
                                   std::int64_t ended_at, bool last) {
  if (ended_at - started_at > limits_.long_ns) watched_ = limits_.watched_batches;
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

// Writes the head of what is gathered; what is added from now on belongs to another frame.
std::string_view ResultSender::take_frame(std::span<char> frame) {
  std::fill_n(frame.begin(), kHead, '\0');
  frame.front() = kResults;
  put_number(frame.data() + 4, std::exchange(count_, 0));
  ++taken_;
  return {frame.data(), frame.size()};
}

void ResultSender::watch() {
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
  count_ = 0;
}

}  // namespace gpubridge::stub
