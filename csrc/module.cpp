// gpubridge._native: the optional compiled half of gpubridge.tensor and gpubridge.transport.
// Everything in it has a Python path, and both pass the same tests.

#include <nanobind/nanobind.h>

#include <cstring>

#include "buffer_view.h"
#include "bytes_codec.h"
#include "dlpack_capsule.h"
#include "lease_book.h"
#include "records.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

void copy(nb::handle destination, nb::handle source) {
  const BufferView to(destination, PyBUF_WRITABLE);
  const BufferView from(source, PyBUF_SIMPLE);
  if (to.size() != from.size()) throw nb::value_error("expected buffers of one size");
  if (to.size() == 0) return;
  nb::gil_scoped_release without_gil;
  std::memmove(to.data(), from.data(), from.size());
}

}  // namespace
}  // namespace gpubridge

NB_MODULE(_native, module) {
  module.def("bytes_count", &gpubridge::count_strings);
  module.def("bytes_encode", &gpubridge::encode_strings);
  module.def("bytes_decode", &gpubridge::decode_strings);
  module.def("copy", &gpubridge::copy);
  module.def("capsule_read", &gpubridge::capsule_read);
  module.def("capsule_take", &gpubridge::capsule_take);
  module.def("capsule_make", &gpubridge::capsule_make);
  gpubridge::bind_lease_book(module);
  gpubridge::bind_records(module);
}
