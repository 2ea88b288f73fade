// Small slots of arenas, for Python: gpubridge/_native.pyi has the contract.
#pragma once

#include <nanobind/nanobind.h>

namespace gpubridge {

void bind_slot_lists(nanobind::module_& module);

}  // namespace gpubridge
