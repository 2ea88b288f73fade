// Requests of HTTP/2 that came as a whole, looked for in the bytes of a connection.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace gpubridge {

// Returns the whole calls from `position` on, where they stop, and what window updates behind the
// last of them give the connection, and how many those are. See
// gpubridge.frontend.http2.whole_calls for what a call is. `known` are the header blocks whose
// meaning is known; frames longer than `longest` are none of a whole call.
nanobind::tuple scan_calls(nanobind::handle buffer, std::size_t position, std::size_t end,
                           nanobind::handle known, std::size_t longest);

}  // namespace gpubridge
