#include <poll.h>
#include <sched.h>

#include "clock.h"
#include "ipc/wait_predictor.h"
#include "python_object.h"

namespace gpubridge {

bool WaitPredictor::stay_awake(int descriptor, std::int64_t nanoseconds) {
  pollfd looked{descriptor, POLLIN, 0};
  bool readable = false;
  std::int64_t away = 0;
  {
    const nb::gil_scoped_release unlocked;
    std::int64_t before = monotonic_ns();
    const std::int64_t end = before + nanoseconds;
    do {
      readable = ::poll(&looked, 1, 0) > 0;
      if (readable) {
        away = 0;
        break;
      }
      before = monotonic_ns();
      sched_yield();
      const std::int64_t after = monotonic_ns();
      away = after - before;
      before = after;
    } while (away <= limits_.taken && before < end);
  }
  taken = away > limits_.taken;
  if (away > limits_.contended) run_ = -kPenalty;
  return readable;
}

void bind_wait_predictor(nb::module_& module) {
  nb::class_<WaitPredictor>(module, "WaitPredictor")
      .def(
          "__init__",
          [](WaitPredictor* place, std::int64_t awake_ns, std::int64_t taken_ns,
             std::int64_t contended_ns) {
            new (place) WaitPredictor(awake_ns, {taken_ns, contended_ns});
          },
          nb::arg("awake_ns"), nb::arg("taken_ns") = LookLimits{}.taken,
          nb::arg("contended_ns") = LookLimits{}.contended)
      .def("begin", &WaitPredictor::begin)
      .def_prop_ro("likely", &WaitPredictor::likely)
      .def("end", &WaitPredictor::end)
      .def("stay_awake", &WaitPredictor::stay_awake)
      .def("poll", &WaitPredictor::poll)
      .def("give_up", &WaitPredictor::give_up)
      .def("crowd", &WaitPredictor::crowd)
      .def_rw("alone", &WaitPredictor::alone)
      .def_ro("taken", &WaitPredictor::taken);
}

}  // namespace gpubridge
