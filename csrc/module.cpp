// gpubridge._native: required in the server, optional in stubs, whose pure Python runtime passes
// the same tests. Stubs in other interpreters get a build with GPUBRIDGE_STUB_ONLY, of few sources
// (CMakeLists.txt lists them).

#include "dataplane.h"
#include "python_object.h"

NB_MODULE(_native, module) {
  using namespace gpubridge;
  // A process that ends with a traceback still holds views: its log should not mention them.
  nb::set_leak_warnings(false);
  const auto bind = [&](auto... bindings) { (bindings(module), ...); };
  bind(bind_bls_reader, bind_bls_records, bind_bytes_codec, bind_context, bind_datagrams,
       bind_dlpack_capsule, bind_lease_book, bind_output_pool, bind_place, bind_records,
       bind_result_arena, bind_stub, bind_stub_loop, bind_wait_predictor, bind_watched_pages);
#ifndef GPUBRIDGE_STUB_ONLY
  bind(bind_access_log, bind_busy_poll, bind_call_channel, bind_growing_memory, bind_grpc_inference,
       bind_grpc_stream, bind_heap_limits, bind_http1_connection, bind_http1_inference, bind_http2,
       bind_in_flight, bind_infer_request, bind_item_batcher, bind_message_receiver,
       bind_model_counters, bind_request_dispatch, bind_responses, bind_slot_lists, bind_templates,
       bind_tensor_values, bind_trace_sampling);
#endif
}
