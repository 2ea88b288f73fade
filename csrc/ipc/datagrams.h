// The hot half of gpubridge.transport.channel: whole messages, and being awake when they come.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace gpubridge {

// Receives one message of a SEQPACKET socket by way of `scratch`, which holds the longest there is.
// Returns its bytes, the descriptors that came with it, which are the caller's, and whether any of
// that was cut off. Raises OSError.
nanobind::tuple receive_message(int descriptor, nanobind::handle scratch);

// Looks for something to read until there is, or for `nanoseconds`, and offers the processor to
// others each time; ends when they have had it for longer than `patience`. Returns whether there is
// something, and for how long they had it the last time.
nanobind::tuple stay_awake(int descriptor, std::int64_t nanoseconds, std::int64_t patience);

}  // namespace gpubridge
