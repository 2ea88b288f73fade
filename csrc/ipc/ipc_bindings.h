// The bindings of this folder, each in a file of its own; ipc_binding.cpp joins them.
#pragma once

#include <nanobind/nanobind.h>

namespace gpubridge {

// Adds the classes Call and CallChannel to the module.
void bind_call_channel(nanobind::module_& module);

// Adds the class ContextCodec and the table CONTEXT_FIELDS to the module.
void bind_context(nanobind::module_& module);

// Adds the class InFlightRequests to the module.
void bind_in_flight(nanobind::module_& module);

// Adds the types InferRequest and InferResponseFields to the module.
void bind_infer_request(nanobind::module_& module);

// Adds the class ModelCounters to the module.
void bind_model_counters(nanobind::module_& module);

// Adds the class RecordReader and the function encode_record to the module.
void bind_records(nanobind::module_& module);

}  // namespace gpubridge
