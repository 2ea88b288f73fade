"""Rows of the result table, each with its minimum and its aim."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Kind(str, Enum):
    """Way of measuring a row."""

    LOAD = "load"
    START = "start"
    IDLE = "idle"
    SOAK = "soak"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the result table.

    ``minimum`` and ``aim`` are ratios gpubridge / Triton of ``metric`` (benchmarks/README.md);
    None where the design names none. For a metric where less is better the ratio must stay below
    them, else above.
    """

    name: str
    title: str
    kind: Kind
    metric: str
    unit: str
    less_is_better: bool
    minimum: float | None = None
    aim: float | None = None
    payload: str = ""
    connections: int = 0
    protocol: str = "http"
    shared_memory: bool = False
    light_client: bool = False
    slow_imports: bool = False


def _throughput(
    payload: str, title: str, connections: int, minimum: float | None, aim: float | None
) -> Row:
    return Row(
        f"{payload}_http_{connections}",
        f"{title}, HTTP, {_count(connections)}",
        Kind.LOAD,
        metric="requests_per_second",
        unit="req/s",
        less_is_better=False,
        minimum=minimum,
        aim=aim,
        payload=payload,
        connections=connections,
    )


def _latency(payload: str, title: str, minimum: float | None, aim: float | None) -> Row:
    return Row(
        f"{payload}_http_1",
        f"{title}, HTTP, {_count(1)}",
        Kind.LOAD,
        metric="p50_us",
        unit="µs p50",
        less_is_better=True,
        minimum=minimum,
        aim=aim,
        payload=payload,
        connections=1,
    )


def _calls(row: Row, concurrent: int) -> Row:
    """Return a row of the same work over gRPC."""
    return replace(
        row,
        name=f"{row.payload}_grpc_{concurrent}",
        title=row.title.replace(
            "HTTP, " + _count(row.connections), f"gRPC, {concurrent} concurrent"
        ),
        connections=concurrent,
        protocol="grpc",
    )


def _light(row: Row) -> Row:
    """Return a row of the same work over gRPC from a client that costs little CPU time itself."""
    called = _calls(row, row.connections)
    return replace(
        called,
        name=f"{row.payload}_h2load_{row.connections}",
        title=row.title.replace("HTTP", "gRPC") + " of h2load",
        light_client=True,
    )


def _in_shared_memory(row: Row) -> Row:
    """Return a row of the same work over gRPC, with the tensors in system shared memory."""
    called = _calls(row, row.connections)
    return replace(
        called,
        name=f"{row.payload}_shm_{row.connections}",
        title=called.title.replace("gRPC,", "system shared memory and gRPC,"),
        shared_memory=True,
    )


def _stream(clients: int) -> Row:
    """Return a row of streams of small responses, each client with one stream at a time."""
    title = f"100 small responses to a request, gRPC stream, {clients} client"
    return Row(
        f"stream_100_h2load_{clients}",
        title if clients == 1 else title + "s",
        Kind.LOAD,
        metric="responses_per_second",
        unit="responses/s",
        less_is_better=False,
        minimum=2.0,
        payload="stream_100",
        connections=clients,
        protocol="grpc",
        light_client=True,
    )


def _count(connections: int) -> str:
    return "1 connection" if connections == 1 else f"{connections} connections"


_ADD_SUB = "add_sub FP32[16]"
_BATCHED = "add_sub FP32[16] in batches of at most 32, delay 2 ms"
_600K = "600 KB FP32 in and out"
_16M = "16 MiB FP32 in and out"
_STRINGS = "10,000 strings in and out"
_CALL = "a BLS call of add_sub"
_64_CALLS = "64 concurrent BLS calls of add_sub"

ROWS: tuple[Row, ...] = (
    _throughput("add_sub", _ADD_SUB, 16, minimum=3.0, aim=4.0),
    _latency("add_sub", _ADD_SUB, minimum=1.0, aim=0.8),
    _throughput("fp32_600k", _600K, 4, minimum=2.0, aim=2.5),
    _latency("fp32_600k", _600K, minimum=None, aim=None),
    _throughput("fp32_16m", _16M, 4, minimum=None, aim=None),
    _latency("fp32_16m", _16M, minimum=None, aim=None),
    _throughput("bytes_10k", _STRINGS, 4, minimum=3.0, aim=10.0),
    _latency("bytes_10k", _STRINGS, minimum=1 / 3, aim=1 / 10),
    _calls(_throughput("add_sub", _ADD_SUB, 16, minimum=2.5, aim=4.0), 16),
    replace(
        _calls(_latency("add_sub", _ADD_SUB, minimum=0.7, aim=0.5), 1),
        metric="mean_us",
        unit="µs mean",
    ),
    _calls(_throughput("fp32_600k", _600K, 4, minimum=2.0, aim=3.0), 4),
    _light(_throughput("add_sub", _ADD_SUB, 16, minimum=2.5, aim=4.0)),
    _light(_throughput("fp32_600k", _600K, 4, minimum=2.0, aim=3.0)),
    _in_shared_memory(_throughput("fp32_16m", _16M, 1, minimum=4.0, aim=None)),
    _in_shared_memory(_throughput("fp32_16m", _16M, 4, minimum=4.0, aim=None)),
    _throughput("bls_add_sub", _CALL, 1, minimum=2.0, aim=4.0),
    _throughput("bls_64_add_sub", _64_CALLS, 1, minimum=3.0, aim=None),
    _stream(1),
    _stream(50),
    _throughput("add_sub_batched", _BATCHED, 32, minimum=1.0, aim=1.5),
    Row(
        "mean_batch_http_32",
        f"{_BATCHED}, mean batch, HTTP, 32 connections",
        Kind.LOAD,
        metric="mean_batch",
        unit="requests",
        less_is_better=False,
        minimum=0.9,
        payload="add_sub_batched",
        connections=32,
    ),
    Row(
        "start_to_ready",
        "start to ready, one model with a complete config.pbtxt",
        Kind.START,
        metric="seconds",
        unit="s",
        less_is_better=True,
        minimum=0.5,
        aim=0.25,
    ),
    Row(
        "start_ten_slow_imports",
        "start to ready, ten models with an import of 1 s each",
        Kind.START,
        metric="seconds",
        unit="s",
        less_is_better=True,
        minimum=0.5,
        slow_imports=True,
    ),
    Row(
        "memory_idle",
        "memory of server and stub, one idle model",
        Kind.IDLE,
        metric="pss_mib",
        unit="MiB PSS",
        less_is_better=True,
    ),
    Row(
        "soak",
        "memory kept by the server after the soak",
        Kind.SOAK,
        metric="pss_growth_mib",
        unit="MiB PSS",
        less_is_better=True,
    ),
)


def select(names: str | None) -> tuple[Row, ...]:
    """Return the rows named in a comma-separated list, in table order; all for None.

    Raises
    ------
    ValueError
        If a name is not that of a row; the message lists the names there are.
    """
    if names is None:
        return ROWS
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    known = {row.name for row in ROWS}
    if not wanted or wanted - known:
        unknown = ", ".join(sorted(wanted - known)) or "nothing"
        message = f"no such row: {unknown}; expected some of {', '.join(row.name for row in ROWS)}"
        raise ValueError(message)
    return tuple(row for row in ROWS if row.name in wanted)
