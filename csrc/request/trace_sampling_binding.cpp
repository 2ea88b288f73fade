#include "python_object.h"
#include "request/trace_sampling.h"

namespace gpubridge {

void bind_trace_sampling(nb::module_& module) {
  nb::class_<TraceSampling>(module, "TraceSampling")
      .def(nb::init<>())
      .def("restart", &TraceSampling::restart)
      .def("choose", &TraceSampling::choose)
      .def("count", &TraceSampling::count)
      .def_rw("active", &TraceSampling::active)
      .def_rw("every", &TraceSampling::every)
      .def_rw("contexts", &TraceSampling::contexts);
}

}  // namespace gpubridge
