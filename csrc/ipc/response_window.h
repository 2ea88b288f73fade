// The responses of one request that its reader has and has not passed on: others wait in a store.
#pragma once

#include "std.h"

namespace gpubridge {

// Counts them, oldest first. Their bytes stay in the memory of the model, so there are few.
class ResponseWindow {
 public:
  static constexpr std::size_t kMostResponses = 64;
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 20U;

  // True if the reader may get another response, however large that is.
  [[nodiscard]] bool open() const { return count_ < kMostResponses && bytes_ < kMostBytes; }

  // The reader gets a response; the window is open.
  void hand_out(std::uint64_t nbytes) {
    sizes_[(first_ + count_++) % kMostResponses] = nbytes;
    bytes_ += nbytes;
  }

  // The reader has passed on so many.
  void passed_on(long long responses) {
    for (; responses > 0 && count_ > 0; --responses) {
      bytes_ -= sizes_[first_];
      first_ = (first_ + 1) % kMostResponses;
      --count_;
    }
  }

  // Whether stored responses are being handed out: readers that pass them on at once call back.
  bool handing_out = false;

 private:
  std::array<std::uint64_t, kMostResponses> sizes_{};
  std::size_t first_ = 0;
  std::size_t count_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace gpubridge
