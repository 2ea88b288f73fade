// Views of borrowed memory, whose end ends their lease.
#pragma once

#include <nanobind/nanobind.h>

namespace gpubridge {

// Adds the class LeaseBook to the module.
void bind_lease_book(nanobind::module_& module);

}  // namespace gpubridge
