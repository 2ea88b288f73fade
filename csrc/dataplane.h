// The compiled data plane of gpubridge: what it consists of, and who owns what.
//
// The plane is a set of C++ objects without an event loop: bytes go in, bytes and batches of events
// come out. Python drives it (gpubridge/dataplane.py has the types that Python sees), and owns all
// sockets; those to stubs are lent to the bindings, which send and receive without blocking.
//
//   csrc/net/      HTTP/1.1, HTTP/2, HPACK, gRPC framing: bytes of a connection <-> messages
//   csrc/request/  request templates: bytes of a message -> checked request; responses -> bytes
//   csrc/schedule/ queues and dynamic batches, without a clock: time is an argument
//   csrc/ipc/      records and messages between server and stub; requests in flight at a stub
//   csrc/memory/   leases, arenas, copies
//   csrc/stub/     the stub's runtime: Tensor, InferenceRequest, InferenceResponse, its loop
//   csrc/tensor/   BYTES codec, DLPack capsules
//
// Ownership
// - An object has one owner, and is used by one thread at a time; the owner is the object that made
//   it. Objects that refer to each other across owners do so by (index, generation), never by
//   pointer.
// - A connection owns its parser, its unsent bytes and the bodies that are still arriving. A model
//   owns its queue, its templates and the arena of its requests. A stub connection owns the
//   requests in flight at that stub, their tickets and the leases of what was lent to it.
// - Objects of net, request, schedule and ipc hold no Python object, their binding aside: what
//   Python wants back with an event it names by a number (a handle) that it chose. Bindings live in
//   files named *_binding.cpp; only they and csrc/stub/ include nanobind or Python.h.
// - Memory of the caller's that a connection receives into, or has still to send, is kept by an
//   owner without a type (a shared_ptr of void): it is let go where the connection is used, by its
//   thread.
// - Memory that another process may see is addressed as (region, offset, size). A region stays
//   mapped until the last view of it is gone and the last unsent byte of it has left.
// - Only the owner closes a descriptor. Descriptors that arrive with a message belong to its
//   receiver.
// - A lease is one byte of a control page: the lender stores 1 (release) before the message that
//   names it is sent, the borrower stores 0 (release) when its last view is gone, the lender loads
//   it (acquire) before it uses the memory again.
// - Bytes from clients and stubs are hostile: every length, count and index is checked where it is
//   read, and what a stub may write to while it is read is copied first.
// - The plane words no error of a request. Where a check fails it says so, and Python parses the
//   same bytes anew and words it.
//
// Events of a life
// - A stub dies: its connection is drained, then closed; requests it had started fail, the others
//   go back to their queue in order; all leases of that stub end.
// - A request is cancelled: before it was sent it leaves the queue; later the stub is told by the
//   control page, and what it still sends is dropped.
// - A connection closes: its unfinished bodies go back to the arena, its requests are cancelled,
//   its unsent answers end their leases.
// - A model is reloaded while a body is arriving: the body stays in the arena it was begun in; its
//   template is resolved when the body is whole, against the model as it is then.
//
// The way of a plain inference request
// - net/http1_inference.h and net/grpc_inference_binding.cpp take a message to its model, and the
//   response back, without Python code. A message that has no template, or fails a check, goes to
//   Python with its bytes, or with the memory that a large one was received into.
// - net/grpc_stream_binding.cpp sends the responses of decoupled models on streams of gRPC, but for
//   the last of each request; what comes on streams is Python's.
// - request/templates_binding.h makes the InferRequest: it fills in ids, dims and sizes,
//   and gets the values of parameters from the RequestTemplate in Python.
// - A response cache would look a request up before the model's `submit`: in Inference::submit and
//   GrpcInferCall::submit.
// - schedule/request_dispatch_binding.h queues it, and gives it to the least loaded instance;
//   ipc/in_flight_binding.h lends its memory, and sends it on the stub's channel at once, or with
//   others of this turn of the event loop. Messages that wait for the channel are Python's to keep.
// - ipc/in_flight_binding.h takes what comes on the channel: it understands a whole message, then
//   gives each request its outcome, then has the dispatch fill the free places. Messages other than
//   results and responses, and those with descriptors, go to Python. Sequences are dispatched in
//   Python, and so are policies: refusals, cancels, the order of outcomes, dead stubs.
// - ipc/call_channel_binding.cpp does the same for the calls of a stub's model: it finds the
//   memory that a call names, makes the InferRequest by what Python says of calls of that form, and
//   lends the caller the memory of the outcome.
// - The outcome comes to the exchange or the call, which is its own callback. While a request is at
//   a model the two hold each other; the outcome, or a cancel, parts them.
#pragma once

#include "python_object.h"

namespace gpubridge {

// Each adds what the file of its name has to the module.
using Binding = void(nb::module_& module);
Binding bind_access_log, bind_bls_reader, bind_bls_records, bind_busy_poll, bind_bytes_codec,
    bind_call_channel, bind_context, bind_datagrams, bind_dlpack_capsule, bind_growing_memory,
    bind_grpc_inference, bind_grpc_stream, bind_heap_limits, bind_http1_connection,
    bind_http1_inference, bind_http2, bind_in_flight, bind_infer_request, bind_item_batcher,
    bind_lease_book, bind_model_counters, bind_output_pool, bind_place, bind_records,
    bind_request_dispatch, bind_message_receiver, bind_responses, bind_result_arena,
    bind_slot_lists, bind_stub, bind_stub_loop, bind_templates, bind_tensor_values,
    bind_trace_sampling, bind_wait_predictor, bind_watched_pages;

}  // namespace gpubridge
