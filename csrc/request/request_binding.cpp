#include "dataplane.h"
#include "request/json_values_binding.h"
#include "request/request_fields.h"

namespace gpubridge {

void bind_request(nanobind::module_& module) {
  module.def("read_opening", &read_opening);
  module.def("read_request", &read_request);
  bind_json_values(module);
}

}  // namespace gpubridge
