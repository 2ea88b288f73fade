#include "net/frame_vectors.h"

#include <limits.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>

#include "buffer_view.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

constexpr std::size_t kHeader = 9;

// The pieces of one system call. What does not fit into it is left to the next.
class Pieces {
 public:
  void add(char* start, std::size_t size) {
    if (size != 0 && count_ < pieces_.size()) pieces_[count_++] = {start, size};
  }

  // Holds on to the memory of a buffer until the call is over.
  const BufferView& hold(nb::handle buffer, int flags) {
    return views_.emplace_back(buffer, flags);
  }

  void add_vector(const nb::tuple& vector, int flags) {
    if (vector.size() != 4) throw nb::value_error("expected headers, payload, size and lead");
    const BufferView& headers = hold(vector[0], flags);
    const BufferView& payload = hold(vector[1], flags);
    const auto size = nb::cast<std::size_t>(vector[2]);
    const auto lead = nb::cast<std::size_t>(vector[3]);
    if (size == 0 || lead > payload.size()) throw nb::value_error("expected frames in the payload");
    const std::size_t frames = (payload.size() - lead + size - 1) / size;
    if (frames > headers.size() / kHeader) throw nb::value_error("expected a header per frame");
    auto* header = static_cast<char*>(headers.data());
    auto* bytes = static_cast<char*>(payload.data());
    add(bytes, lead);
    for (std::size_t at = lead; at < payload.size(); at += size, header += kHeader) {
      add(header, kHeader);
      add(bytes + at, std::min(size, payload.size() - at));
    }
  }

  template <typename Call>
  Py_ssize_t move(Call call, int descriptor) {
    const nb::gil_scoped_release unlocked;
    const ssize_t moved = call(descriptor, pieces_.data(), static_cast<int>(count_));
    return std::max<ssize_t>(moved, 0);
  }

 private:
  std::deque<BufferView> views_;
  std::array<iovec, IOV_MAX> pieces_;
  std::size_t count_ = 0;
};

}  // namespace

Py_ssize_t read_vector(int descriptor, nb::tuple vector) {
  Pieces pieces;
  pieces.add_vector(vector, PyBUF_WRITABLE);
  return pieces.move(readv, descriptor);
}

Py_ssize_t write_parts(int descriptor, nb::list parts) {
  Pieces pieces;
  for (const nb::handle part : parts) {
    if (PyTuple_Check(part.ptr())) {
      pieces.add_vector(nb::borrow<nb::tuple>(part), PyBUF_SIMPLE);
    } else {
      const BufferView& view = pieces.hold(part, PyBUF_SIMPLE);
      pieces.add(static_cast<char*>(view.data()), view.size());
    }
  }
  return pieces.move(writev, descriptor);
}

}  // namespace gpubridge
