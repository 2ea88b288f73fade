// Output memory for Python, which makes it, and gives it back when memory is short.

#include "stub/output_pool.h"

#include "heap_type.h"

namespace gpubridge {

void bind_output_pool(nb::module_& module) {
  using stub::OutputPool;
  nb::class_<OutputPool>(module, "OutputPool", nb::type_slots(collected<OutputPool>()))
      .def(nb::init<nb::object, nb::handle>())
      .def("give_back", [](OutputPool& self) { self.give_back(); })
      .def("take_copied", &OutputPool::take_copied)
      .def("disown", &OutputPool::disown);
}

}  // namespace gpubridge
