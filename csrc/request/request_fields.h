// The top level of a ModelInferRequest, for gpubridge.protocol.grpc.fields.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace gpubridge {

// Returns form, id, number of inputs, size of the first raw content and where that begins, of the
// beginning of a message of `nbytes` that reaches so far, in the usual order; else None.
nanobind::object read_opening(nanobind::handle data, std::uint64_t nbytes);

}  // namespace gpubridge
