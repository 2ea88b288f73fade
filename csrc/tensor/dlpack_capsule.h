// DLPack capsules: making, reading and consuming them. The rules of what may be imported are in
// gpubridge/tensor/dlpack.py.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace gpubridge {

nanobind::tuple capsule_read(nanobind::handle capsule);
nanobind::object capsule_take(nanobind::handle capsule);
nanobind::object capsule_make(nanobind::object owner, std::uintptr_t address,
                              nanobind::sequence shape, nanobind::tuple dtype,
                              nanobind::tuple device, uint64_t flags, bool versioned);

}  // namespace gpubridge
