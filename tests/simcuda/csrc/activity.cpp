#include "activity.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>

#include "pause.h"

namespace {

Activity& take_counters() {
  const int own = getpid();
  // Those of a process that is gone are read no more when all are taken.
  for (const bool of_dead : {false, true})
    for (Activity& each : control().activities) {
      std::int32_t pid = each.pid.load();
      if (of_dead ? kill(pid, 0) == 0 : pid != 0) continue;
      if (!each.pid.compare_exchange_strong(pid, own)) continue;
      for (auto* counter : {&each.held_us, &each.stalled_us, &each.paid_us, &each.spun_us,
                            &each.slept_us, &each.polls})
        *counter = 0;
      return each;
    }
  static Activity uncounted{};
  return uncounted;
}

}  // namespace

Activity& activity() {
  static Activity& own = take_counters();
  return own;
}

bool spins(CUcontext context) { return (context->flags.load() & kBlockingSync) == 0; }

void wait_until(const std::function<bool()>& done, bool spinning) {
  using std::chrono::steady_clock;
  Pause pause;
  auto& counter = spinning ? activity().spun_us : activity().slept_us;
  auto counted = steady_clock::now();
  while (!done()) {
    pause.rest();
    // Counted as it goes: a wait may never end.
    const auto passed =
        std::chrono::duration_cast<std::chrono::microseconds>(steady_clock::now() - counted);
    counter += static_cast<std::uint64_t>(passed.count());
    counted += passed;
  }
}
