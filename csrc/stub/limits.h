// Limits of a stub; gpubridge/stub/limits.py says what each means, and their values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpubridge::stub {

struct StubLimits {
  std::int64_t gathered_ns = 0;
  std::size_t gathered_bytes = 0;
  std::int64_t long_ns = 0;
  std::int64_t watched_batches = 0;
  std::int64_t patience_ns = 0;
  std::int64_t quiet_looks = 0;
  std::size_t kept_leases = 0;
  std::size_t kept_bytes = 0;
  std::uint64_t passed_on_bytes = 0;
};

}  // namespace gpubridge::stub
