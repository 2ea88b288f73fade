#include "ipc/datagrams.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "buffer_view.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

constexpr std::size_t kMaxDescriptors = 16;

std::int64_t now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

nb::list descriptors_of(msghdr& message) {
  nb::list descriptors;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t index = 0; index < count; ++index) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(part) + index * sizeof(int), sizeof(int));
      descriptors.append(descriptor);
    }
  }
  return descriptors;
}

}  // namespace

nb::tuple receive_message(int descriptor, nb::handle scratch) {
  const BufferView room(scratch, PyBUF_WRITABLE);
  iovec piece{room.data(), room.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> ancillary;
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  ssize_t count = -1;
  do {
    message.msg_control = ancillary.data();
    message.msg_controllen = ancillary.size();
    {
      const nb::gil_scoped_release unlocked;
      count = recvmsg(descriptor, &message, MSG_CMSG_CLOEXEC);
    }
    if (count < 0 && (errno != EINTR || PyErr_CheckSignals() != 0)) {
      if (PyErr_Occurred() == nullptr) PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
  } while (count < 0);
  const bool cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  return nb::make_tuple(
      nb::bytes(static_cast<const char*>(room.data()), static_cast<std::size_t>(count)),
      descriptors_of(message), cut);
}

nb::tuple stay_awake(int descriptor, std::int64_t nanoseconds, std::int64_t patience) {
  pollfd looked{descriptor, POLLIN, 0};
  bool readable = false;
  std::int64_t away = 0;
  {
    const nb::gil_scoped_release unlocked;
    std::int64_t before = now();
    const std::int64_t end = before + nanoseconds;
    do {
      readable = poll(&looked, 1, 0) > 0;
      if (readable) break;
      before = now();
      sched_yield();
      const std::int64_t after = now();
      away = after - before;
      before = after;
    } while (away <= patience && before < end);
  }
  return nb::make_tuple(readable, away);
}

}  // namespace gpubridge
