#include "dataplane.h"
#include "net/frame_vectors.h"
#include "net/http2_calls.h"

namespace gpubridge {

void bind_net(nanobind::module_& module) {
  module.def("scan_calls", &scan_calls);
  module.def("read_vector", &read_vector);
  module.def("write_parts", &write_parts);
}

}  // namespace gpubridge
