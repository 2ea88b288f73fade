// gpubridge._native: the optional compiled half of gpubridge.tensor and gpubridge.transport.
// Everything in it has a Python path, and both pass the same tests.

#include <nanobind/nanobind.h>

#include "bytes_codec.h"
#include "datagrams.h"
#include "dlpack_capsule.h"
#include "frame_vectors.h"
#include "http2_calls.h"
#include "lease_book.h"
#include "place.h"
#include "records.h"
#include "request_fields.h"
#include "result_arena.h"

NB_MODULE(_native, module) {
  // A process that ends with a traceback still holds views: nothing that its log should tell.
  nanobind::set_leak_warnings(false);
  module.def("bytes_count", &gpubridge::count_strings);
  module.def("bytes_encode", &gpubridge::encode_strings);
  module.def("bytes_decode", &gpubridge::decode_strings);
  module.def("capsule_read", &gpubridge::capsule_read);
  module.def("capsule_take", &gpubridge::capsule_take);
  module.def("capsule_make", &gpubridge::capsule_make);
  gpubridge::bind_lease_book(module);
  gpubridge::bind_records(module);
  module.def("arena_set", &gpubridge::arena_set);
  module.def("arena_state", &gpubridge::arena_state);
  module.def("offset_within", &gpubridge::offset_within);
  module.def("place", &gpubridge::place);
  module.def("read_opening", &gpubridge::read_opening);
  module.def("read_request", &gpubridge::read_request);
  module.def("scan_calls", &gpubridge::scan_calls);
  module.def("receive_message", &gpubridge::receive_message);
  module.def("stay_awake", &gpubridge::stay_awake);
  module.def("read_vector", &gpubridge::read_vector);
  module.def("write_parts", &gpubridge::write_parts);
}
