"""Differences seen where the same was put to both servers by hand: no recorded answer keeps these true."""

from __future__ import annotations

__all__ = ["BY_HAND"]

# Situation, Triton, gpubridge, and why.
BY_HAND = (
    (
        "status of a load that a fault in the scheduler's settings or an ensemble's maps prevents",
        "500, `failed to poll`",
        "400, `load failed`, with the same reason",
        "the configuration is at fault, not the server",
    ),
    (
        "`/generate`, and the model's error has the code UNAVAILABLE",
        "400",
        "503",
        "as over `/infer`: clients try again later",
    ),
    (
        "`--http-header-forward-pattern`, and a request of `/generate`",
        "its headers reach no model",
        "they are parameters, as over `/infer`",
        "a bug of theirs",
    ),
    (
        "a header that is forwarded twice, or has the name of a parameter",
        "the name stands twice in the JSON of `request.parameters()`",
        "once, with the last header's value",
        "JSON parsers take the last one, too",
    ),
    (
        "the header of a restricted endpoint, where the pattern of forwarded headers matches it",
        "reaches models",
        "does not",
        "its value is a secret",
    ),
    (
        "the header of a restricted endpoint, sent twice",
        "the first counts",
        "the last counts",
        "as for every other header",
    ),
    (
        "statistics: errors that a model returns, requests that the sequence scheduler refuses",
        "no count knows of them",
        "are failures",
        "every request is in one of the counts",
    ),
    (
        "a stream with `triton_grpc_error` asks for a model that is not there",
        "goes on after the error",
        "ends with it",
        "that header asks for gRPC's own errors, and those end a call",
    ),
    (
        "an `np.bytes_` in an output's array of objects",
        "is sent as the text of its `repr`",
        "is sent as its bytes",
        "the data is what the model meant",
    ),
    (
        "a model writes into the array of a tensor that it got, and hands on the tensor itself",
        "what arrived is handed on",
        "what was written, if nobody else has the tensor",
        "the array is a view, not a copy",
    ),
    (
        "outputs and parameters of an ensemble's answer",
        "any order; parameters such as `sequence_id` among them",
        "the configuration's order; no such parameters",
        "repeatable",
    ),
    (
        "more `raw_input_contents` than inputs that need them",
        "taken as if they were not there",
        "400 with both numbers",
        "one of them was meant for something",
    ),
    (
        "an input or output that is declared twice",
        "is taken; two inputs of one name refuse every request",
        "counts once, with a warning; declared in two ways it is refused",
        "published configurations have the same twice; which of two ways is meant, nobody knows",
    ),
    (
        "strings of a `config.pbtxt` that are not UTF-8",
        "are loaded",
        "are refused, with the place",
        "protobuf's text is UTF-8",
    ),
    (
        "gRPC's certificate is missing, or its key is another's",
        "`Socket '0.0.0.0:8001' already in use`",
        "the file, and what is wrong with it",
        "that is what has to be mended",
    ),
    (
        "a new certificate",
        "is read at the next start",
        "is read at SIGHUP, too",
        "certificates are short-lived",
    ),
)
