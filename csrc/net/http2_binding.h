// What Python sees of HTTP/2.
#pragma once

#include <nanobind/nanobind.h>

namespace gpubridge {

void bind_http2(nanobind::module_& module);

}  // namespace gpubridge
