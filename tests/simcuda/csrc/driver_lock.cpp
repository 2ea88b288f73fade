#include "driver_lock.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "activity.h"
#include "world.h"

namespace {

std::uint64_t now_us() {
  // The same clock in all processes.
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(since).count());
}

void sleep_until(std::uint64_t until, std::uint64_t now) {
  if (until > now) std::this_thread::sleep_for(std::chrono::microseconds(until - now));
}

}  // namespace

void hold_driver(std::uint64_t microseconds) {
  // It is held until a time that all can read: a process that is killed leaves no lock behind.
  auto& held_until = control().driver_held_until_us;
  std::uint64_t before = held_until.load();
  std::uint64_t until = 0;
  std::uint64_t now = 0;
  do {
    now = now_us();
    until = std::max(before, now) + microseconds;
  } while (!held_until.compare_exchange_weak(before, until));
  activity().held_us += microseconds;
  sleep_until(until, now);
}

void wait_for_driver() {
  const std::uint64_t until = control().driver_held_until_us.load();
  if (until == 0) return;
  const std::uint64_t now = now_us();
  if (until <= now) return;
  sleep_until(until, now);
  activity().stalled_us += until - now;
}

void spend(int microseconds) {
  activity().paid_us += static_cast<std::uint64_t>(microseconds);
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}
