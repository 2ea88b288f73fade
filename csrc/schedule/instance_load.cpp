#include "schedule/instance_load.h"

namespace gpubridge {
namespace {

// About this much work is sent ahead.
constexpr double kAheadNs = 1e6;
constexpr double kLimit = 64;
// Time to wake a process that sleeps, and whose memory is in no cache.
constexpr double kWakeNs = 50e3;
// The same where it has to share a processor.
constexpr double kBusyWakeNs = 200e3;
// Weight of the latest batch in the average.
constexpr double kWeight = 0.125;

}  // namespace

void InstanceLoad::open(std::size_t least_window) {
  least_ = least_window;
  execute_ns_ = 0;
  window_ = 1;
  open_ = true;
}

bool InstanceLoad::soon_done(bool processors_busy) const {
  return in_flight_ != 0 && in_flight_ < window_ && execute_ns_ != 0 &&
         static_cast<double>(in_flight_) * execute_ns_ < (processors_busy ? kBusyWakeNs : kWakeNs);
}

void InstanceLoad::withdrawn(std::size_t batches) {
  in_flight_ -= std::min(in_flight_, batches);
  batches_ -= std::min(batches_, batches);
  stuck_ = in_flight_ != 0;
  if (stuck_) window_ = least_;
}

void InstanceLoad::answered(std::size_t batches, std::size_t requests, std::uint64_t execute_ns) {
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

}  // namespace gpubridge
