"""What clients' connections may cost: how many there are, and how long they may take.

A field is a flag: ``--http-`` or ``--grpc-`` and its name. Where tritonserver has such a flag, name,
unit and meaning are its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["CompressionLevel", "GrpcConnections", "HttpConnections"]

CompressionLevel = Literal["none", "low", "medium", "high"]


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


class _Connections:
    """Checks what the fields have in common: nothing is negative."""

    __slots__ = ()

    door = ""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not value >= 0:
                raise _invalid(self.door, each.name, "a number of at least 0", str(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConnections(_Connections):
    """Limits of the HTTP doors' connections; 0 is none.

    Times are seconds. A request that is being executed is never late.

    Attributes
    ----------
    max_connections : int
        Open at once, at each endpoint. For one more, the one that has been idle for longest is closed; if
        none is idle, the new one is answered with 503 and closed.
    header_timeout : float
        From the first byte of a request's head to its last.
    body_timeout : float
        In each such time, a body must bring 500 bytes a second on average, or end.
    idle_timeout : float
        Without a request, from the last answer or the beginning.
    send_timeout : float
        In each such time, a client must take 500 bytes a second of its answers on average.
    """

    door = "http"

    max_connections: int = _flag(
        4096,
        "connections open at once; for one more the longest idle one is closed, else it gets 503",
    )
    header_timeout: float = _flag(30.0, "seconds that the head of a request may take")
    body_timeout: float = _flag(60.0, "seconds in which a body must bring 500 bytes each")
    idle_timeout: float = _flag(300.0, "seconds that a connection may be open without a request")
    send_timeout: float = _flag(60.0, "seconds in which a client must take 500 bytes each")

    @property
    def times(self) -> tuple[float, ...]:
        """All time-outs, in seconds."""
        return self.header_timeout, self.body_timeout, self.idle_timeout, self.send_timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConnections(_Connections):
    """Limits of the gRPC door's connections; 0 is none where nothing else is said.

    Attributes
    ----------
    max_connections : int
        Open at once. For one more, the one that has been idle for the longest time gets GOAWAY; if
        none is idle, the new one.
    preface_timeout : float
        Seconds to the end of the client's preface and settings.
    message_timeout : float
        In each such time (seconds), a message of more than 64 KiB, for which memory is held, must bring
        500 bytes a second on average, or end.
    idle_timeout : float
        Seconds without a call; then GOAWAY, which clients take as nothing special.
    send_timeout : float
        In each such time (seconds), a client must take 500 bytes a second of what is sent.
    keepalive_time : int
        Milliseconds without anything from the client after which it is sent a PING.
    keepalive_timeout : int
        Milliseconds that it may take to answer; then the connection is closed.
    keepalive_permit_without_calls : bool
        Send PINGs, and take more than one in two hours, also while no call is open.
    http2_max_pings_without_data : int
        PINGs sent while nothing else is to be sent.
    http2_min_recv_ping_interval_without_data : int
        Milliseconds between a client's PINGs while nothing is sent to it; a sooner one is a strike.
    http2_max_ping_strikes : int
        Strikes that are tolerated; then GOAWAY "too_many_pings".
    max_connection_age : int
        Milliseconds after which a client is asked, with GOAWAY, to make a new connection.
    max_connection_age_grace : int
        Milliseconds that calls then get to end.
    infer_response_compression_level : {"none", "low", "medium", "high"}
        Whether and how well answers to inference are compressed, for clients that accept it.
    """

    door = "grpc"

    max_connections: int = _flag(
        4096, "connections open at once; for a further one, the longest idle one is closed"
    )
    preface_timeout: float = _flag(20.0, "seconds that the beginning of a connection may take")
    message_timeout: float = _flag(
        60.0, "seconds in which a long message must bring 500 bytes each"
    )
    idle_timeout: float = _flag(3600.0, "seconds that a connection may be open without a call")
    send_timeout: float = _flag(60.0, "seconds in which a client must take 500 bytes each")
    keepalive_time: int = _flag(7_200_000, "milliseconds of silence before a client is pinged")
    keepalive_timeout: int = _flag(20_000, "milliseconds that the answer to a ping may take")
    keepalive_permit_without_calls: bool = _flag(False, "ping also while no call is open")
    http2_max_pings_without_data: int = _flag(2, "pings sent while nothing else is to be sent")
    http2_min_recv_ping_interval_without_data: int = _flag(
        300_000, "milliseconds between a client's pings while nothing is sent to it"
    )
    http2_max_ping_strikes: int = _flag(2, "too early pings that are tolerated")
    max_connection_age: int = _flag(0, "milliseconds until a client is asked to connect anew")
    max_connection_age_grace: int = _flag(0, "milliseconds that its open calls then get")
    infer_response_compression_level: CompressionLevel = field(
        default="none", metadata={"help": "how well answers to inference are compressed"}
    )

    def __post_init__(self) -> None:
        _Connections.__post_init__(self)
        level, levels = self.infer_response_compression_level, get_args(CompressionLevel)
        if level not in levels:
            raise _invalid(
                self.door,
                "infer_response_compression_level",
                f"one of {', '.join(levels)}",
                repr(level),
            )

    @property
    def times(self) -> tuple[float, ...]:
        """All time-outs, in seconds."""
        milliseconds = (
            self.keepalive_time,
            self.keepalive_timeout,
            self.max_connection_age,
            self.max_connection_age_grace,
        )
        seconds = (
            self.preface_timeout,
            self.message_timeout,
            self.idle_timeout,
            self.send_timeout,
        )
        return (*seconds, *(time / 1000 for time in milliseconds))


def _invalid(door: str, name: str, expected: str, got: str) -> BridgeError:
    flag = f"--{door}-{name.replace('_', '-')}"
    return BridgeError(f"{flag} expects {expected}, got {got}", ErrorCode.INVALID_ARG)
