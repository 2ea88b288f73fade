#include "dataplane.h"
#include "tensor/bytes_codec.h"
#include "tensor/dlpack_capsule.h"

namespace gpubridge {

void bind_tensor(nanobind::module_& module) {
  module.def("bytes_count", &count_strings);
  module.def("bytes_encode", &encode_strings);
  module.def("bytes_decode", &decode_strings);
  module.def("capsule_read", &capsule_read);
  module.def("capsule_take", &capsule_take);
  module.def("capsule_make", &capsule_make);
}

}  // namespace gpubridge
