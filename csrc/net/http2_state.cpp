#include "net/http2_state.h"

namespace gpubridge::http2 {
namespace {

constexpr std::int64_t kUsefulPerReset = 1;
constexpr std::int64_t kUsefulPerIdleFrame = 4;

}  // namespace

bool Budget::spend(double now, std::uint64_t useful) {
  if (!since_) since_ = now;
  if (left_ < 1) {
    const double regained =
        (now - *since_) * static_cast<double>(per_second_) +
        static_cast<double>((useful - useful_)) * static_cast<double>(per_useful_);
    left_ = std::min(static_cast<double>(allowance_), left_ + regained);
    since_ = now;
    useful_ = useful;
    if (left_ < 1) return false;
  }
  left_ -= 1;
  return true;
}

void ResetMemory::add(std::uint32_t stream, double now) {
  if (until_.insert_or_assign(stream, now + grace_).second) order_.push_back(stream);
  if (order_.size() > size_) {
    until_.erase(order_.front());
    order_.pop_front();
  }
}

State::State(const Limits& limits, std::shared_ptr<const GrpcMethods> methods)
    : forgiven(static_cast<std::size_t>(limits.reset_memory),
               static_cast<double>(limits.reset_grace_seconds)),
      limits_(limits),
      methods_(std::move(methods)),
      resets_(limits.resets, limits.resets_per_second, kUsefulPerReset),
      idle_(limits.idle_frames, limits.idle_frames_per_second, kUsefulPerIdleFrame) {}

void State::spend_reset() {
  if (resets_.spend(now, completed)) return;
  throw ConnectionFault(ErrorCode::kEnhanceYourCalm, "expected at most ", limits_.resets,
                        " reset streams at once and ", limits_.resets_per_second,
                        " per second beyond those completed, got more");
}

void State::spend_idle_frame() {
  if (idle_.spend(now, completed + data_frames)) return;
  throw ConnectionFault(ErrorCode::kEnhanceYourCalm, "expected at most ", limits_.idle_frames,
                        " frames without use at once and ", limits_.idle_frames_per_second,
                        " per second, got more");
}

}  // namespace gpubridge::http2
