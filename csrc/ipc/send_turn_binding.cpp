#include "ipc/send_turn_binding.h"

#include <poll.h>

#include "clock.h"
#include "ipc/in_flight_binding.h"

namespace gpubridge {
namespace {

// No message waits for longer: about what the loop takes for as many requests as one carries.
constexpr std::int64_t kPatience = 100'000;

}  // namespace

bool SendTurn::has_events() const {
  pollfd looked{events_, POLLIN, 0};
  return events_ >= 0 && poll(&looked, 1, 0) > 0;
}

void SendTurn::call_at_end() { call_soon_(nb::find(this).attr("end")); }

void SendTurn::add(nb::object stub) {
  due_.push_back(std::move(stub));
  if (due_.size() > 1) return;
  since_ = monotonic_ns();
  call_at_end();
}

void SendTurn::end() {
  if (monotonic_ns() - since_ < kPatience && has_events()) {
    call_at_end();
    return;
  }
  for (const nb::object& stub : std::exchange(due_, {})) {
    try {
      nb::cast<at_stub::RequestsAtStub&>(stub).flush();
    } catch (nb::python_error& error) {
      // The others are sent all the same.
      error.discard_as_unraisable("sending requests to a stub");
    }
  }
}

void bind_send_turn(nb::module_& module) {
  nb::class_<SendTurn>(module, "SendTurn")
      .def(nb::init<nb::object, int, std::size_t>())
      .def("end", &SendTurn::end);
}

}  // namespace gpubridge
