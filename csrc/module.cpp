// gpubridge._native: required in the server, optional in stubs, whose pure Python runtime passes
// the same tests.

#include <nanobind/nanobind.h>

#include "dataplane.h"

NB_MODULE(_native, module) {
  // A process that ends with a traceback still holds views: its log should not mention them.
  nanobind::set_leak_warnings(false);
  gpubridge::bind_tensor(module);
  gpubridge::bind_memory(module);
  gpubridge::bind_ipc(module);
  gpubridge::bind_request(module);
  gpubridge::bind_schedule(module);
  gpubridge::bind_net(module);
  gpubridge::bind_stub(module);
}
