#include "dataplane.h"
#include "request/request_fields.h"
#include "request/tensor_values_binding.h"

namespace gpubridge {

void bind_request(nanobind::module_& module) {
  module.def("read_opening", &read_opening);
  module.def("read_request", &read_request);
  bind_tensor_values(module);
}

}  // namespace gpubridge
