#include "net/http2_state.h"

namespace gpubridge::http2 {
namespace {

constexpr std::int64_t kUsefulPerReset = 1;
constexpr std::int64_t kUsefulPerIdleFrame = 4;

}  // namespace

void Limits::check() const {
  struct Range {
    std::string_view name;
    std::int64_t value;
    std::int64_t least;
    std::int64_t most;
  };
  const std::array<Range, 7> ranges = {{
      {"max_concurrent_streams", max_concurrent_streams, 1, kMaxWindow},
      {"max_frame_size", max_frame_size, kDefaultFrameSize, kLargestFrameSize},
      // A smaller one could not be held against a peer that has not read our settings yet.
      {"stream_window", stream_window, kDefaultWindow, kMaxWindow},
      {"connection_window", connection_window, kDefaultWindow, kMaxWindow},
      {"receive_bytes", receive_bytes, header_block_bytes + 1024, 1 << 30},
      {"quantum_bytes", quantum_bytes, 1, kMaxWindow},
      {"output_bytes", output_bytes, 1, kMaxWindow},
  }};
  for (const Range& range : ranges) {
    if (range.value >= range.least && range.value <= range.most) continue;
    throw std::invalid_argument(
        joined(range.name, ": expected ", range.least, " to ", range.most, ", got ", range.value));
  }
}

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

bool ResetMemory::holds(std::uint32_t stream, double now) const {
  const auto found = until_.find(stream);
  return found != until_.end() && now < found->second;
}

State::State(const Limits& limits, std::shared_ptr<const GrpcMethods> methods)
    : forgiven(static_cast<std::size_t>(limits.reset_memory),
               static_cast<double>(limits.reset_grace_seconds)),
      limits_(limits),
      methods_(std::move(methods)),
      resets_(limits.resets, limits.resets_per_second, kUsefulPerReset),
      idle_(limits.idle_frames, limits.idle_frames_per_second, kUsefulPerIdleFrame) {}

Stream* State::find(std::uint32_t id) {
  const auto found = streams.find(id);
  return found == streams.end() ? nullptr : &found->second;
}

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
