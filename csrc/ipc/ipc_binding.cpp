#include "dataplane.h"
#include "ipc/datagrams.h"
#include "ipc/ipc_bindings.h"

namespace gpubridge {

void bind_ipc(nanobind::module_& module) {
  bind_call_channel(module);
  bind_context(module);
  bind_in_flight(module);
  bind_infer_request(module);
  bind_model_counters(module);
  bind_records(module);
  module.def("receive_message", &receive_message);
  module.def("stay_awake", &stay_awake);
}

}  // namespace gpubridge
