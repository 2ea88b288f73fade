// Choice of the requests that are traced. Python follows these; all others stay in the data plane,
// which only counts them.
#pragma once

#include "std.h"

namespace gpubridge {

struct TraceSampling {
  // Requests that were begun before the next one is chosen are counted when they are submitted: at
  // most so many of them are made up for by the requests that follow.
  static constexpr std::uint64_t kBegun = 64;
  // A W3C traceparent of version 0 has this size; its last digit says whether its trace is sampled.
  static constexpr std::size_t kParentSize = 55;

  // Has one of so many requests traced from now on.
  void restart(std::uint64_t one_of) { *this = {active, every, contexts, one_of}; }
  void count() {
    if (seen < rate + kBegun) ++seen;
  }
  // Counts a request; true if it is traced.
  [[nodiscard]] bool choose() {
    count();
    if (rate == 0 || seen < rate) return false;
    seen -= rate;
    return true;
  }
  // True if Python takes a request, with the `traceparent` that `find` returns, if any.
  template <typename Find>
  [[nodiscard]] bool takes(Find&& find) const {
    if (!active || every) return active;
    if (contexts) {
      const std::optional<std::string_view> parent = find();
      if (parent && parent->size() >= kParentSize) {
        return std::string_view("13579bdf").find((*parent)[kParentSize - 1]) !=
               std::string_view::npos;
      }
    }
    return rate != 0 && seen + 1 >= rate;
  }

  bool active = false;     // some request may be traced
  bool every = false;      // Python counts all requests: models have settings of their own
  bool contexts = false;   // a sampled context traces its request, one that is not sampled does not
  std::uint64_t rate = 0;  // one of so many is traced; 0: none but those of sampled contexts
  std::uint64_t seen = 0;  // since the last one that was traced
};

}  // namespace gpubridge
