#include "ipc/datagrams.h"

#include <cerrno>

#include "buffer_view.h"

namespace gpubridge {
namespace {

constexpr std::size_t kMaxDescriptors = 16;

std::vector<int> descriptors_of(msghdr& message) {
  std::vector<int> descriptors;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t index = 0; index < count; ++index) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(part) + index * sizeof(int), sizeof(int));
      descriptors.push_back(descriptor);
    }
  }
  return descriptors;
}

// Receives into `memory`; with MSG_DONTWAIT among the flags it does not block.
Datagram receive_datagram(int descriptor, std::span<char> memory, int flags) {
  iovec piece{memory.data(), memory.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> ancillary;
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = ancillary.data();
  message.msg_controllen = ancillary.size();
  Datagram received;
  received.count = recvmsg(descriptor, &message, flags | MSG_CMSG_CLOEXEC);
  if (received.count >= 0) {
    received.cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
    received.descriptors = descriptors_of(message);
  }
  return received;
}

}  // namespace

Datagram receive_now(int descriptor, std::span<char> memory) {
  Datagram received;
  do {
    received = receive_datagram(descriptor, memory, MSG_DONTWAIT);
  } while (received.count < 0 && errno == EINTR);
  return received;
}

Datagram receive_unlocked(int descriptor, std::span<char> memory) {
  const nb::gil_scoped_release unlocked;
  return receive_datagram(descriptor, memory, 0);
}

nb::list descriptors_of(const Datagram& datagram) {
  nb::list descriptors;
  for (const int each : datagram.descriptors) descriptors.append(each);
  return descriptors;
}

bool send_datagram(int descriptor, std::string_view message, int flags) {
  ssize_t sent = -1;
  do {
    sent = send(descriptor, message.data(), message.size(), flags | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent >= 0;
}

nb::tuple message_of(const Datagram& datagram, std::span<const char> memory) {
  if (datagram.count < 0) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  return nb::make_tuple(nb::bytes(memory.data(), static_cast<std::size_t>(datagram.count)),
                        descriptors_of(datagram), datagram.cut);
}

nb::tuple receive_message(int descriptor, nb::handle scratch) {
  const BufferView buffer(scratch, PyBUF_WRITABLE);
  const std::span memory(static_cast<char*>(buffer.data()), buffer.size());
  Datagram received = receive_unlocked(descriptor, memory);
  while (received.count < 0 && errno == EINTR) {
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    received = receive_unlocked(descriptor, memory);
  }
  return message_of(received, memory);
}

void bind_datagrams(nb::module_& module) { module.def("receive_message", &receive_message); }

}  // namespace gpubridge
