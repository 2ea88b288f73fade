#include "place.h"

#include <cstring>

#include "buffer_view.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

constexpr std::size_t kAlignment = 64;
// Above this the model's other threads go on while bytes are copied.
constexpr std::size_t kLarge = std::size_t{1} << 18U;

void copy(char* to, const BufferView& from) {
  if (from.size() > kLarge) {
    nb::gil_scoped_release without_gil;
    std::memcpy(to, from.data(), from.size());
  } else if (from.size() != 0) {
    std::memcpy(to, from.data(), from.size());
  }
}

}  // namespace

nb::list place(nb::handle memory, nb::handle buffers, std::uint64_t region, std::uint64_t offset,
               std::uint64_t lease) {
  const BufferView target(memory, PyBUF_WRITABLE);
  nb::list fields;
  std::size_t at = 0;
  for (nb::handle buffer : buffers) {
    const BufferView source(buffer, PyBUF_SIMPLE);
    if (at > target.size() || source.size() > target.size() - at) {
      throw nb::value_error("expected room for all buffers");
    }
    copy(static_cast<char*>(target.data()) + at, source);
    fields.append(region);
    fields.append(offset + at);
    fields.append(source.size());
    fields.append(lease);
    at += (source.size() + kAlignment - 1) / kAlignment * kAlignment;
  }
  return fields;
}

}  // namespace gpubridge
