// CLOCK_MONOTONIC, which the server and its stubs share.
#pragma once

#include "std.h"

namespace gpubridge {

inline std::int64_t monotonic_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

// As Python's time.monotonic.
inline double monotonic_seconds() { return static_cast<double>(monotonic_ns()) * 1e-9; }

}  // namespace gpubridge
