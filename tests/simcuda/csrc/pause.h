// Pauses of a thread that looks again and again: short at first, then so long that it costs
// nothing.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

class Pause {
 public:
  void rest() {
    std::this_thread::sleep_for(next_);
    next_ = std::min(next_ * 5 / 4, kLongest);
  }

 private:
  static constexpr std::chrono::microseconds kLongest{10'000};

  std::chrono::microseconds next_{20};
};
