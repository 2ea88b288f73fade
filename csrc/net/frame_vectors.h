// Frames of HTTP/2 read from and written to a socket: their payloads lie side by side in memory,
// their headers elsewhere.
#pragma once

#include <nanobind/nanobind.h>

namespace gpubridge {

// Both return how many bytes were moved by one system call, 0 if it failed: the socket's transport
// will meet the same error and knows what to do. See gpubridge.frontend.grpc.vectored_io.

// A vector is (headers, payload, size, lead): payload begins with `lead` bytes of a frame whose
// header has come already; each further `size` bytes (the last may be fewer) follow a header.
Py_ssize_t read_vector(int descriptor, nanobind::tuple vector);

// Writes buffers and vectors in turn.
Py_ssize_t write_parts(int descriptor, nanobind::list parts);

}  // namespace gpubridge
