// The top level of a ModelInferRequest, for gpubridge.protocol.grpc.fields.
#pragma once

#include <nanobind/nanobind.h>

namespace gpubridge {

// Returns form, id, sizes and offsets of a whole message whose fields come in the usual order; None
// for any other, and for bytes that are no message.
nanobind::object read_request(const nanobind::bytes& message);

}  // namespace gpubridge
