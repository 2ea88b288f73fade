"""The rows of varied traffic: requests, models, and the minimums of CPU time per request."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.traffic import (
    SEQUENCE,
    TURN,
    Traffic,
    binary_request,
    grpc_request,
    json_request,
    shared_request,
)
from benchmarks.varied_models import SHAPE_DIMS

__all__ = ["NAMES", "OWN_ROWS", "REGIONS", "ROWS", "START_ROWS", "LoadRow", "OwnRow", "StartRow"]

#: Begin the names of the regions of shared memory that hold inputs, and outputs; of this run alone.
REGIONS = (f"gpubridge-bench-{os.getpid()}-in-", f"gpubridge-bench-{os.getpid()}-out-")

_SERVICE = "/inference.GRPCInferenceService"
_INFER = f"{_SERVICE}/ModelInfer"
_STREAM_INFER = f"{_SERVICE}/ModelStreamInfer"
_SUM = ("OUTPUT0", "OUTPUT1")
_SEQUENCE_REQUESTS = 10


@dataclass(frozen=True, slots=True)
class LoadRow:
    """Work that both servers are given.

    ``minimum`` and ``aim`` bound Triton's CPU time per request over gpubridge's, or with ``by_rate``
    gpubridge's rate over Triton's; None where there is no bar. ``models`` are served beside those that the requests name; ``tls`` has calls of gRPC sent
    through TLS; ``flags`` are given to both servers.
    """

    name: str
    title: str
    traffic: Callable[[], Traffic]
    connections: int
    minimum: float | None
    aim: float | None = None
    models: tuple[str, ...] = ()
    tls: bool = False
    flags: tuple[str, ...] = ()
    by_rate: bool = False


@dataclass(frozen=True, slots=True)
class OwnRow:
    """Two works that gpubridge alone is given: CPU time per request of ``one`` over ``other``.

    ``proxied`` sends the first of them through HAProxy, with that line more for its backend.
    """

    name: str
    title: str
    one: LoadRow
    other: LoadRow
    at_most: float
    aim: float | None = None
    proxied: str | None = None


@dataclass(frozen=True, slots=True)
class StartRow:
    """A start with so many small models; seconds until ready and memory of all processes."""

    name: str
    title: str
    models: int
    at_most_seconds: float | None = None


def _pair() -> dict[str, NDArray[np.float32]]:
    return {
        "INPUT0": np.arange(16, dtype=np.float32),
        "INPUT1": np.full(16, 0.5, dtype=np.float32),
    }


def _add_sub(
    *models: str, request_id: str | None = None, vary_values: bool = True
) -> Callable[[], Traffic]:
    def make() -> Traffic:
        named = models or ("add_sub",)
        requests = [
            binary_request(model, _pair(), _SUM, request_id=request_id, vary_values=vary_values)
            for model in named
        ]
        return Traffic(requests, named)

    return make


def _add_sub_calls(request_id: str = "") -> Callable[[], Traffic]:
    return lambda: Traffic(
        [grpc_request("add_sub", _pair(), request_id=request_id)], ("add_sub",), path=_INFER
    )


def _new_shapes() -> Traffic:
    shapes = list(itertools.product(range(1, 5), repeat=SHAPE_DIMS))
    random.Random(7).shuffle(shapes)  # noqa: S311  (an order, no secret)
    requests = []
    for shape in shapes:
        array = np.ones(shape, np.float32)
        requests.append(binary_request("add_sub_any", {"INPUT0": array, "INPUT1": array}, _SUM))
    return Traffic(requests, ("add_sub_any",))


def _sized_bytes() -> Traffic:
    sizes = list(range(1000, 8000, 7))
    random.Random(7).shuffle(sizes)  # noqa: S311  (an order, no secret)
    mark = TURN.encode()
    requests = [
        binary_request("count_bytes", {"IN": mark + b"x" * (size - len(mark))}, ("COUNT",))
        for size in sizes
    ]
    return Traffic(requests, ("count_bytes",))


def _many(count: int) -> Callable[[], Traffic]:
    def make() -> Traffic:
        inputs = {f"IN{index}": np.full(16, index, np.float32) for index in range(count)}
        outputs = [f"OUT{index}" for index in range(count)]
        name = f"many_{count}"
        return Traffic([binary_request(name, inputs, outputs, request_id=TURN)], (name,))

    return make


def _summed() -> Traffic:
    inputs = {f"IN{index}": np.full(16, index, np.float32) for index in range(500)}
    return Traffic(
        [binary_request("summed_500", inputs, ("SUM",), request_id=TURN)], ("summed_500",)
    )


def _identity(nbytes: int) -> Callable[[], Traffic]:
    array = np.arange(nbytes // 4, dtype=np.float32)
    return lambda: Traffic(
        [binary_request("identity_fp32", {"INPUT0": array}, ("OUTPUT0",))], ("identity_fp32",)
    )


def _identity_calls(nbytes: int) -> Callable[[], Traffic]:
    array = np.arange(nbytes // 4, dtype=np.float32)
    return lambda: Traffic(
        [grpc_request("identity_fp32", {"INPUT0": array})], ("identity_fp32",), path=_INFER
    )


def _shared_identity(nbytes: int) -> Traffic:
    shape = [nbytes // 4]
    given, answered = (
        f'{{"name":"{name}","datatype":"FP32","shape":{shape}}}' for name in ("INPUT0", "OUTPUT0")
    )
    request = shared_request("identity_fp32", given, answered, REGIONS)
    return Traffic([request], ("identity_fp32",), regions=REGIONS[0])


def _json_add_sub(model: str, numbers: Sequence[str]) -> Callable[[], Traffic]:
    inputs = ",".join(
        f'{{"name":"{name}","datatype":"FP32","shape":[{len(numbers)}],"data":[{",".join(numbers)}]}}'
        for name in ("INPUT0", "INPUT1")
    )
    document = f'{{"inputs":[{inputs}]}}'
    return lambda: Traffic([json_request(f"/v2/models/{model}/infer", document)], (model,))


def _decimals(count: int) -> list[str]:
    """Return numbers of six digits, of which one in ten varies with each request."""
    digits = random.Random(7)  # noqa: S311  (values, no secret)
    return [
        "0." + ("@" * 6 if index % 10 == 0 else str(digits.randrange(100_000, 1_000_000)))
        for index in range(count)
    ]


def _chat(stream: bool) -> str:
    content = f"What is the number after {TURN}, and what is the one before it?"
    document = {"messages": [{"role": "user", "content": content}], "stream": stream}
    return json.dumps({"model": "chat_stream" if stream else "chat", **document})


def _chat_completions(stream: bool) -> Callable[[], Traffic]:
    model, responses = ("chat_stream", 10) if stream else ("chat", 1)
    request = json_request("/v1/chat/completions", _chat(stream))
    return lambda: Traffic([request], (model,), responses=responses)


def _chat_calls(stream: bool) -> Callable[[], Traffic]:
    """Return the same work over gRPC: the model is given the same body."""
    model, responses = ("chat_stream", 10) if stream else ("chat", 1)
    path = _STREAM_INFER if stream else _INFER
    request = grpc_request(model, {"openai_request": _chat(stream).encode()})
    return lambda: Traffic([request], (model,), path=path, responses=responses)


def _sequences(strategy: str) -> Callable[[], Traffic]:
    def make() -> Traffic:
        name = f"sequence_{strategy}"
        requests = []
        for step in range(_SEQUENCE_REQUESTS):
            flags = {
                "sequence_start": step == 0,
                "sequence_end": step == _SEQUENCE_REQUESTS - 1,
            }
            parameters = json.dumps(flags)[:-1] + f', "sequence_id": {SEQUENCE}}}'
            array = np.full((1, 1), 1, np.float32)
            requests.append(
                binary_request(name, {"INPUT": array}, ("OUTPUT",), parameters=parameters)
            )
        return Traffic(requests, (name,), in_order=True)

    return make


def _chain() -> Traffic:
    array = np.arange(16, dtype=np.float32)
    return Traffic([binary_request("chain", {"IN": array}, ("OUT",))], ("chain",))


def _generate(stream: bool) -> Callable[[], Traffic]:
    model, call = ("stream_10", "generate_stream") if stream else ("text", "generate")
    document = f'{{"text_input": "What is the number after {TURN}?"}}'
    return lambda: Traffic([json_request(f"/v2/models/{model}/{call}", document)], (model,))


def _long_stream() -> Traffic:
    array = np.ones(1, np.float32)
    return Traffic(
        [grpc_request("stream_5000", {"IN": array}, request_id=TURN)],
        ("stream_5000",),
        path=_STREAM_INFER,
        responses=5000,
    )


def _softmax(form: str) -> LoadRow:
    array = np.linspace(0, 1, 256, dtype=np.float32).reshape(1, 256)
    model = f"softmax_{form}"
    return LoadRow(
        f"batch_{form}",
        f"softmax of a row of 256, gRPC, 64, batches as {form}",
        lambda: Traffic([grpc_request(model, {"IN": array})], (model,), path=_INFER),
        64,
        None,
    )


_ONE_BUSY = LoadRow("busy_one", "one busy model × 4 instances", _add_sub("busy_0"), 16, None)
_FOUR_BUSY = LoadRow(
    "busy_four",
    "four busy models × 4 instances, HTTP, 16 connections",
    _add_sub("busy_0", "busy_1", "busy_2", "busy_3"),
    16,
    None,
)
_BY_HTTP = LoadRow(
    "add_sub_values", "add_sub, HTTP, 16 connections, new values", _add_sub(), 16, None
)
_IN_ENVIRONMENT = replace(_BY_HTTP, traffic=_add_sub("add_sub_environment"))
_CALLS = LoadRow("add_sub_grpc_16", "add_sub, gRPC, 16", _add_sub_calls(), 16, 5, 9)
_MANY_48 = LoadRow("tensors_48", "48 tensors of 64 bytes in and out, HTTP, 4", _many(48), 4, None)
_MANY_500 = LoadRow(
    "tensors_500", "500 tensors of 64 bytes in and out, HTTP, 4", _many(500), 4, 10, 30
)

ROWS: tuple[LoadRow, ...] = (
    LoadRow(
        "add_sub_equal",
        "add_sub, HTTP, 16 connections, equal bytes",
        _add_sub(vary_values=False),
        16,
        6,
        10,
    ),
    _BY_HTTP,
    LoadRow(
        "add_sub_ids",
        "add_sub, HTTP, 16 connections, a new id in every request",
        _add_sub(request_id=TURN),
        16,
        5,
        9,
    ),
    LoadRow(
        "add_sub_cached",
        "add_sub, HTTP, 16 connections, a new id in every request, answered from the response cache",
        _add_sub("add_sub_cached", request_id=TURN, vary_values=False),
        16,
        None,
        flags=("--cache-config=local,size=16777216",),
    ),
    LoadRow(
        "add_sub_shapes",
        "add_sub, HTTP, 16 connections, a new shape in every request",
        _new_shapes,
        16,
        4,
        8,
    ),
    LoadRow("bytes_sizes", "BYTES of 1,000 sizes, counted, HTTP, 16", _sized_bytes, 16, 5, 8),
    _CALLS,
    LoadRow(
        "add_sub_grpc_ids",
        "add_sub, gRPC, 16, a new id in every request",
        _add_sub_calls(TURN),
        16,
        5,
        9,
    ),
    LoadRow(
        "add_sub_http_1",
        "add_sub, HTTP, 1 connection, a new id",
        _add_sub(request_id=TURN),
        1,
        3,
        4,
    ),
    LoadRow(
        "add_sub_grpc_1",
        "add_sub, gRPC, 1 connection, a new id",
        _add_sub_calls(TURN),
        1,
        2.5,
        4,
    ),
    LoadRow("fp32_600k_grpc_4", "600 KB in and out, gRPC, 4", _identity_calls(600_000), 4, 3.5, 5),
    LoadRow("fp32_600k_http_4", "600 KB in and out, HTTP, 4", _identity(600_000), 4, 5, 6),
    *(
        LoadRow(
            f"shm_16m_{clients}",
            f"16 MB in and out in system shared memory, HTTP, {clients}: rate",
            lambda: _shared_identity(1 << 24),
            clients,
            minimum,
            aim,
            by_rate=True,
        )
        for clients, minimum, aim in ((1, 4, 5), (4, 6, 8))
    ),
    LoadRow(
        "tls_add_sub_grpc_16",
        "add_sub, gRPC with TLS, 16, a new id",
        _add_sub_calls(TURN),
        16,
        1.5,
        tls=True,
    ),
    LoadRow(
        "tls_fp32_600k_grpc_16",
        "600 KB in and out, gRPC with TLS, 16",
        _identity_calls(600_000),
        16,
        1.5,
        tls=True,
    ),
    LoadRow(
        "bls_1", "a BLS call of add_sub, HTTP, 1", _add_sub("bls_add_sub"), 1, 4, 8, ("add_sub",)
    ),
    LoadRow(
        "bls_10_in_a_row",
        "ten BLS calls of add_sub in a row, HTTP, 1",
        _add_sub("bls_10_in_a_row"),
        1,
        3,
        4,
        ("add_sub",),
    ),
    LoadRow(
        "bls_64",
        "64 concurrent BLS calls, HTTP, 1",
        _add_sub("bls_64_add_sub"),
        1,
        4,
        6,
        ("add_sub",),
    ),
    LoadRow("stream_5000", "a stream of 5,000 responses, gRPC, 1", _long_stream, 1, 4, 6),
    _MANY_48,
    _MANY_500,
    LoadRow(
        "tensors_500_summed",
        "500 tensors of 64 bytes, each looked at by as_numpy, HTTP, 4",
        _summed,
        4,
        7,
        10,
    ),
    LoadRow(
        "json_add_sub",
        "add_sub, JSON in and out, HTTP, 16",
        _json_add_sub("add_sub", ["@" * 6, *map(str, range(1, 16))]),
        16,
        4,
        6,
    ),
    LoadRow(
        "json_add_sub_1000",
        "add_sub of 1,000 numbers, JSON in and out, HTTP, 16",
        _json_add_sub("add_sub_1000", _decimals(1000)),
        16,
        4,
        8,
    ),
    LoadRow("sequence_direct", "sequences of 10, direct, HTTP, 16", _sequences("direct"), 16, 1, 2),
    LoadRow("sequence_oldest", "sequences of 10, oldest, HTTP, 16", _sequences("oldest"), 16, 1, 2),
    LoadRow(
        "ensemble_3",
        "an ensemble of three, HTTP, 16",
        _chain,
        16,
        1,
        2,
        ("plus_0", "plus_1", "plus_2"),
    ),
    LoadRow("generate", "generate, HTTP, 16", _generate(stream=False), 16, 4, 6),
    LoadRow("generate_stream", "generate_stream of 10, HTTP, 16", _generate(stream=True), 16, 4, 6),
    _FOUR_BUSY,
)

OWN_ROWS: tuple[OwnRow, ...] = (
    OwnRow(
        "busy_models",
        "four busy models × 4 instances over one of them",
        _FOUR_BUSY,
        _ONE_BUSY,
        at_most=1.15,
        aim=1.0,
    ),
    OwnRow(
        "busy_models_each",
        "four busy models × 4 instances with 64 connections over one of them with 16",
        replace(_FOUR_BUSY, connections=64),
        _ONE_BUSY,
        at_most=1.15,
        aim=1.0,
    ),
    OwnRow(
        "batch_arrays",
        "softmax of batched rows by execute_batch over a loop over the requests",
        _softmax("arrays"),
        _softmax("loop"),
        at_most=1.0,
    ),
    OwnRow(
        "one_file",
        "softmax of batched rows by a function of one file over the same model in a repository",
        _softmax("file"),
        _softmax("arrays"),
        at_most=1.1,
    ),
    OwnRow(
        "haproxy",
        "add_sub through HAProxy over HTTP/2 (http-no-delay) over direct",
        _CALLS,
        _CALLS,
        at_most=1.2,
        aim=1.05,
        proxied="",
    ),
    OwnRow(
        "haproxy_shared",
        "the same where its clients share connections (http-reuse always) over direct",
        _CALLS,
        _CALLS,
        at_most=1.2,
        aim=1.05,
        proxied="http-reuse always",
    ),
    OwnRow(
        "access_log",
        "add_sub with an access log over without one, HTTP, 16",
        replace(_BY_HTTP, flags=("--access-log=true",)),
        _BY_HTTP,
        at_most=1.3,
    ),
    OwnRow(
        "environment",
        "add_sub in a Python environment of its own over the server's, HTTP, 16",
        _IN_ENVIRONMENT,
        _BY_HTTP,
        at_most=1.3,
        aim=1.1,
    ),
    *(
        OwnRow(
            "chat_stream" if stream else "chat",
            f"/v1/chat/completions{', streamed' * stream} over the same model by gRPC, 16",
            LoadRow("", "", _chat_completions(stream), 16, None),
            LoadRow("", "", _chat_calls(stream), 16, None),
            at_most=2.0,
        )
        for stream in (False, True)
    ),
    OwnRow("tensors_linear", "500 tensors over 48", _MANY_500, _MANY_48, at_most=12),
)

START_ROWS: tuple[StartRow, ...] = (
    StartRow("start_1", "start to ready, 1 small model", 1),
    StartRow("start_50", "start to ready, 50 small models", 50, 6.0),
    StartRow("start_150", "start to ready, 150 small models", 150),
)

NAMES: tuple[str, ...] = (
    *(row.name for row in ROWS),
    *(row.name for row in OWN_ROWS),
    *(row.name for row in START_ROWS),
)
"""The names of all rows, in the order of the page."""
