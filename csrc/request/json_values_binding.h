// Tensor data as JSON, for Python: gpubridge/_native.pyi has the functions.
#pragma once

#include <nanobind/nanobind.h>

namespace gpubridge {

void bind_json_values(nanobind::module_& module);

}  // namespace gpubridge
