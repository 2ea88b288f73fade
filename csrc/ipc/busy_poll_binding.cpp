#include "ipc/busy_poll_binding.h"

namespace gpubridge {
namespace {

// Longest wait inside one turn, so that the loop's timers run.
constexpr std::int64_t kGlance = 50'000;

}  // namespace

bool BusyPoll::sent(bool alone) {
  if (!alone) {
    requests_.crowd();
    return false;
  }
  const std::int64_t now = this->now();
  requests_.end(now);
  begin(answers_, now);
  return requests_.likely();
}

void BusyPoll::answered() {
  const std::int64_t now = this->now();
  answers_.end(now);
  begin(requests_, now);
}

void BusyPoll::begin(WaitPredictor& waits, std::int64_t now) {
  if (!waits.begin(now)) return;
  waits_ = &waits;
  until_ = now + awake_ns_;
  if (std::exchange(on_, true)) return;
  call_turn();
}

void BusyPoll::turn() {
  const std::int64_t left = until_ - now();
  on_ = left > 0;
  if (!on_) {
    waits_->give_up();
    return;
  }
  // A client may need the processor for several threads: look once a turn only.
  const std::int64_t glance = waits_ == &answers_ && events_ >= 0 ? kGlance : 0;
  waits_->stay_awake(events_, std::min(left, glance));
  // Another thread wanted the processor: stop polling.
  on_ = !waits_->taken;
  if (on_) call_turn();
}

void bind_busy_poll(nb::module_& module) {
  nb::class_<BusyPoll>(module, "BusyPoll")
      .def(
          "__init__",
          [](BusyPoll* place, nb::object call_soon, int events, std::int64_t awake_ns,
             std::int64_t taken_ns, nb::object clock) {
            LookLimits limits;
            limits.taken = taken_ns;
            new (place) BusyPoll(std::move(call_soon), events, awake_ns, limits, std::move(clock));
          },
          nb::arg("call_soon"), nb::arg("events"), nb::arg("awake_ns"),
          nb::arg("taken_ns") = LookLimits{}.taken, nb::arg("clock").none() = nb::none())
      .def("sent", &BusyPoll::sent, nb::arg("alone"))
      .def("resumed", &BusyPoll::resumed)
      .def("paused", &BusyPoll::paused)
      .def("answered", &BusyPoll::answered)
      .def("turn", &BusyPoll::turn);
}

}  // namespace gpubridge
