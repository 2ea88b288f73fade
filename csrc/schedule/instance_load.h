// How many requests a stub has, and how many it may have: so that it never waits, and little is
// lost if it dies.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpubridge {

// The load of one model instance, whose stubs come one after the other.
class InstanceLoad {
 public:
  [[nodiscard]] std::size_t in_flight() const { return in_flight_; }
  [[nodiscard]] std::size_t batches() const { return batches_; }
  // Requests that it may have at once; 0 while it takes none.
  [[nodiscard]] std::size_t window() const { return window_; }
  // Requests, or batches of them, that it may have however long they take.
  [[nodiscard]] std::size_t least_window() const { return least_; }

  // A stub takes requests from now on.
  void open(std::size_t least_window);
  // There is no stub any more, and nothing at one.
  void close();

  void sent(std::size_t requests);
  // Batches were answered, or tickets came free; there may be so many other requests at the stub.
  void answered(std::size_t batches, std::size_t requests, std::uint64_t execute_ns,
                std::size_t free_tickets);

 private:
  std::size_t in_flight_ = 0;
  std::size_t batches_ = 0;
  std::size_t window_ = 0;
  std::size_t least_ = 1;
  bool open_ = false;
  double execute_ns_ = 0;  // of a request, on average; 0 before the first
};

}  // namespace gpubridge
