"""The contract between the server's control plane (Python) and its compiled data plane (C++).

The plane is a set of objects without an event loop: bytes go in, bytes and batches of events come out.
``csrc/dataplane.h`` documents them and their ownership. Each object is used by the event loop's thread
only. The plane writes no error texts of requests: if a check fails, Python parses the same bytes again and
raises the error.
"""

from __future__ import annotations

from gpubridge._native import (
    AccessLog,
    BusyPoll,
    Call,
    CallChannel,
    CallCounts,
    DynamicBatcher,
    GeneratedTemplate,
    GrowingMemory,
    GrpcConnectionState,
    GrpcInferEndpoint,
    GrpcMethods,
    HeaderFields,
    Http2Connection,
    Http2Limits,
    HttpConnectionState,
    HttpExchange,
    HttpInferEndpoint,
    HttpOrigins,
    IdleConnections,
    InferRequest,
    InferResponseFields,
    InferTargets,
    InFlightRequests,
    InstanceFeed,
    JsonResponseTemplate,
    MessageReceiver,
    MessageResponseTemplate,
    ModelCounters,
    RequestCounts,
    RequestDispatch,
    RequestHeaders,
    RequestRecord,
    RequestShapes,
    RequestTemplates,
    RequiredField,
    SendTurn,
    SlotLists,
    StreamResponses,
    TraceSampling,
    count_json_parts,
    format_json_string,
    format_json_values,
    limit_heap,
    owned_view,
    pack_json_parameters,
    pack_json_values,
    pack_typed_contents,
    plain_json_string,
    read_fields,
    split_form,
    split_json_data,
    split_long_strings,
)
