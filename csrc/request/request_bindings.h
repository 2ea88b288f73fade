// The parts of the module that this folder adds.
#pragma once

#include <nanobind/nanobind.h>

namespace gpubridge {

void bind_responses(nanobind::module_& module);
void bind_templates(nanobind::module_& module);

}  // namespace gpubridge
