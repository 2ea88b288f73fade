// When messages leave for the stubs of a server.
#pragma once

#include "python_object.h"

namespace gpubridge {

namespace at_stub {
class RequestsAtStub;
}  // namespace at_stub

// To wake a stub for a message, and then the server for its result, takes several times what a
// small request takes. So messages wait at the end of a turn of the event loop, where requests are
// added to them, as long as the loop has other events to see to.
class SendTurn {
 public:
  // `events` is readable while the event loop has events; -1 where it does not tell. `call_soon`
  // has something called at the end of its turn. There are so many processors.
  SendTurn(nb::object call_soon, int events, std::size_t processors)
      : call_soon_(std::move(call_soon)), events_(events), processors_(processors) {}

  // True if nothing is going to leave soon, nor likely to be added.
  [[nodiscard]] bool is_quiet() const { return due_.empty() && !has_events(); }
  // Flushes what is at a stub when it is time.
  void add(nb::object stub);
  // A turn ends.
  void end();

  // A stub has got work, or has no more.
  void working(bool begins) { working_ += begins ? 1 : -1; }
  // True if a stub that is woken has to share a processor with this process, or a stub at work.
  [[nodiscard]] bool crowded() const { return working_ + 1 >= processors_; }

 private:
  [[nodiscard]] bool has_events() const;
  void call_at_end();

  nb::object call_soon_;
  int events_;
  std::size_t processors_;
  std::size_t working_ = 0;
  std::vector<nb::object> due_;
  std::int64_t since_ = 0;  // when the first of them came
};

}  // namespace gpubridge
