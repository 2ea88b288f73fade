// Tensors put into a slot one after another.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace gpubridge {

// Copies bytes; the interpreter's other threads run meanwhile where they are many.
void copy_bytes(char* to, const void* from, std::size_t size);

// Copies buffers to `memory`, each aligned to 64 bytes; returns the fields of their references:
// region, offset (from that of `memory`), size and lease of each, one after another.
nanobind::list place(nanobind::handle memory, nanobind::handle buffers, std::uint64_t region,
                     std::uint64_t offset, std::uint64_t lease);

// Where in `memory` all of `buffer` lies, -1 where it does not.
std::int64_t offset_within(nanobind::handle memory, nanobind::handle buffer);

}  // namespace gpubridge
