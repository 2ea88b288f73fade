// HTTP/1 connections, for Python: gpubridge/_native.pyi has the types.
#pragma once

#include <nanobind/nanobind.h>

namespace gpubridge {

void bind_http1(nanobind::module_& module);

namespace http1 {
void bind_inference(nanobind::module_& module);
}

}  // namespace gpubridge
