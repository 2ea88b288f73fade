// The hot half of gpubridge.transport.channel: whole messages.
#pragma once

#include <sys/socket.h>

#include "python_object.h"

namespace gpubridge {

// The longest message that is sent as one datagram.
inline constexpr std::size_t kDatagramLimit = 128UL * 1024;

// One message of a SEQPACKET socket.
struct Datagram {
  std::ptrdiff_t count = -1;     // bytes; negative where errno says why there are none
  bool cut = false;              // whether anything of it was left out
  std::vector<int> descriptors;  // they are the receiver's
};

// Receives without blocking.
[[nodiscard]] Datagram receive_now(int descriptor, std::span<char> memory);
// Waits for a message, or until a signal comes, without the interpreter's lock.
[[nodiscard]] Datagram receive_unlocked(int descriptor, std::span<char> memory);
// Its descriptors, for Python.
nb::list descriptors_of(const Datagram& datagram);
// What was received into `memory` as `receive_message` returns it. Raises the OSError of errno
// where nothing was.
nb::tuple message_of(const Datagram& datagram, std::span<const char> memory);
// Sends a message, without flags without blocking; false with errno set where it was not sent.
[[nodiscard]] bool send_datagram(int descriptor, std::string_view message,
                                 int flags = MSG_DONTWAIT);

// Receives one message of a SEQPACKET socket by way of `scratch`, which holds the longest there is.
// Returns its bytes, the descriptors that came with it, which are the caller's, and whether any of
// that was cut off. Raises OSError.
nb::tuple receive_message(int descriptor, nb::handle scratch);

}  // namespace gpubridge
