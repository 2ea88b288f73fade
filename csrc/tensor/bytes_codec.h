// BYTES tensors: each element is a little-endian uint32 length followed by its bytes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace gpubridge {

std::size_t count_strings(nanobind::handle buffer);
nanobind::object encode_strings(nanobind::handle items);
void decode_strings(nanobind::handle buffer, nanobind::handle items);

}  // namespace gpubridge
