#include "dataplane.h"
#include "net/http1_binding.h"
#include "net/http2_binding.h"

namespace gpubridge {

void bind_net(nanobind::module_& module) {
  bind_http1(module);
  bind_http2(module);
}

}  // namespace gpubridge
