// Tensor data as JSON and as typed fields, for Python: gpubridge/_native.pyi has the functions.
#pragma once

#include <nanobind/nanobind.h>

namespace gpubridge {

void bind_tensor_values(nanobind::module_& module);

}  // namespace gpubridge
