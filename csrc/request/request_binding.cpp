#include "dataplane.h"
#include "request/request_bindings.h"
#include "request/request_fields.h"
#include "request/tensor_values_binding.h"

namespace gpubridge {

void bind_request(nanobind::module_& module) {
  module.def("read_opening", &read_opening);
  bind_responses(module);
  bind_templates(module);
  bind_tensor_values(module);
}

}  // namespace gpubridge
