"""The contract between the server's control plane (Python) and its compiled data plane (C++).

The plane is a set of objects without an event loop: bytes go in, bytes and batches of events come out.
``csrc/dataplane.h`` says what they consist of and who owns what. Each object is used by one thread, the
event loop's. The plane words no error of a request: where a check fails it says so, and Python parses the
same bytes anew and words it.
"""

from __future__ import annotations

from gpubridge._native import (
    Call,
    CallChannel,
    DynamicBatcher,
    GrpcConnectionState,
    GrpcInferEndpoint,
    GrpcMethods,
    HeaderFields,
    Http2Connection,
    Http2Limits,
    HttpConnectionState,
    HttpExchange,
    HttpInferEndpoint,
    IdleConnections,
    InferRequest,
    InferResponseFields,
    InferTargets,
    InFlightRequests,
    InstanceFeed,
    JsonResponseTemplate,
    MessageResponseTemplate,
    ModelCounters,
    RequestDispatch,
    RequestHeaders,
    RequestShapes,
    RequestTemplates,
    SlotLists,
    format_json_string,
    format_json_values,
    pack_json_parameters,
    pack_json_values,
    pack_typed_contents,
    split_json_data,
)

__all__ = [
    "Call",
    "CallChannel",
    "DynamicBatcher",
    "GrpcConnectionState",
    "GrpcInferEndpoint",
    "GrpcMethods",
    "HeaderFields",
    "Http2Connection",
    "Http2Limits",
    "HttpConnectionState",
    "HttpExchange",
    "HttpInferEndpoint",
    "IdleConnections",
    "InFlightRequests",
    "InferRequest",
    "InferResponseFields",
    "InferTargets",
    "InstanceFeed",
    "JsonResponseTemplate",
    "MessageResponseTemplate",
    "ModelCounters",
    "RequestDispatch",
    "RequestHeaders",
    "RequestShapes",
    "RequestTemplates",
    "SlotLists",
    "format_json_string",
    "format_json_values",
    "pack_json_parameters",
    "pack_json_values",
    "pack_typed_contents",
    "split_json_data",
]
