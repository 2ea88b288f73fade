// Device memory that a framework cuts its tensors from, so that they can be handed to other models
// as they are. The framework calls `gpubridge_arena_malloc` and `gpubridge_arena_free`, which it
// finds by name in this library.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace gpubridge {

// Lends `nbytes` of device memory from `pointer` on from now on; what was cut before stays valid
// for as long as its memory does, and goes nowhere when it is given back.
void arena_set(std::uintptr_t pointer, std::size_t nbytes);

// Returns bytes in use, and the size of the last request that was not met since this was asked
// last.
nanobind::tuple arena_state();

}  // namespace gpubridge
