// The records of EXECUTE and RESULTS messages; their layout is that of
// gpubridge.transport.messages.
#pragma once

#include <nanobind/nanobind.h>

namespace gpubridge {

// Adds the class RecordReader and the function encode_record to the module.
void bind_records(nanobind::module_& module);

}  // namespace gpubridge
