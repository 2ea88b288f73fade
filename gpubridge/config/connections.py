"""Flags of connections over HTTP and gRPC: their limits, and TLS, which is named as Triton's for gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from gpubridge.errors import invalid
from gpubridge.flags import check_flags, flag

CompressionLevel = Literal["none", "low", "medium", "high"]
HTTP_GROUP, GRPC_GROUP = "HTTP", "gRPC"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Certificates of one endpoint; their files are read when it opens."""

    flag_prefix: ClassVar[str]

    use_ssl: bool = flag(
        False, "serve TLS only; its files are reloaded on SIGHUP, for new connections"
    )
    use_ssl_mutual: bool = flag(
        False, "serve TLS only, to clients with a certificate signed by the root certificate"
    )
    server_cert: str = flag(
        "", "the server's certificate, with intermediate certificates; PEM", metavar="FILE"
    )
    server_key: str = flag(
        "", "the private key of the certificate, without a password; PEM", metavar="FILE"
    )
    root_cert: str = flag("", "root certificates of clients for mutual TLS; PEM", metavar="FILE")

    @property
    def served(self) -> bool:
        """Return whether the endpoint speaks TLS."""
        return self.use_ssl or self.use_ssl_mutual

    def flag_name(self, field: str) -> str:
        """Return the flag that sets a field."""
        return f"--{self.flag_prefix}{field.replace('_', '-')}"

    def __post_init__(self) -> None:
        needed = ["server_cert", "server_key"] if self.served else []
        needed += ["root_cert"] if self.use_ssl_mutual else []
        for field in needed:
            if not getattr(self, field):
                asking = self.flag_name("use_ssl_mutual" if self.use_ssl_mutual else "use_ssl")
                raise invalid(f"{asking} needs {self.flag_name(field)}")

    def notices(self) -> Iterator[str]:
        """Yield a log line for each given flag without effect."""
        for field, used, switch in (
            ("server_cert", self.served, "use_ssl"),
            ("server_key", self.served, "use_ssl"),
            ("root_cert", self.use_ssl_mutual, "use_ssl_mutual"),
        ):
            if getattr(self, field) and not used:
                reader = self.flag_name(switch)
                yield f"{self.flag_name(field)} has no effect: it is read with {reader}=true only"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTls(TlsSettings):
    """Certificates of the HTTP endpoint; metrics are served without TLS."""

    flag_prefix: ClassVar[str] = "http-"
    flag_group: ClassVar[str] = HTTP_GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcTls(TlsSettings):
    """Certificates of the gRPC endpoint."""

    flag_prefix: ClassVar[str] = "grpc-"
    flag_group: ClassVar[str] = GRPC_GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConnections:
    """Limits of HTTP connections; 0 is none. Executing requests have no timeout here."""

    flag_prefix: ClassVar[str] = "http-"
    flag_group: ClassVar[str] = HTTP_GROUP

    max_connections: int = flag(
        4096,
        "maximum open connections of each HTTP endpoint; above it the longest idle one is closed, "
        "or the new one gets 503; 0 for no limit",
        least=0,
    )
    header_timeout: float = flag(
        30.0,
        "maximum seconds of a TLS handshake and of the head of a request; 0 for no limit",
        least=0,
    )
    body_timeout: float = flag(
        60.0,
        "window in seconds in which a body must arrive at 500 bytes/s or more; 0 for no minimum",
        least=0,
    )
    idle_timeout: float = flag(
        300.0, "maximum seconds of a connection without a request; 0 for no limit", least=0
    )
    send_timeout: float = flag(
        60.0,
        "window in seconds in which a client must read responses at 500 bytes/s or more; 0 for no minimum",
        least=0,
    )

    def __post_init__(self) -> None:
        check_flags(self)

    @property
    def times(self) -> tuple[float, ...]:
        """All timeouts, in seconds."""
        return self.header_timeout, self.body_timeout, self.idle_timeout, self.send_timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConnections:
    """Limits of gRPC connections; 0 is none unless stated otherwise.

    Idle and old connections get GOAWAY, after which clients reconnect.
    """

    flag_prefix: ClassVar[str] = "grpc-"
    flag_group: ClassVar[str] = GRPC_GROUP

    max_connections: int = flag(
        4096,
        "maximum open connections; above it the longest idle one gets GOAWAY, or the new one; 0 for no "
        "limit",
        least=0,
    )
    preface_timeout: float = flag(
        20.0,
        "maximum seconds of a TLS handshake and of a client's preface and settings; 0 for no limit",
        least=0,
    )
    message_timeout: float = flag(
        60.0,
        "window in seconds in which the message of a unary call, or one that a stream has begun, must "
        "arrive at 500 bytes/s or more, and a header block must end; 0 for no minimum",
        least=0,
    )
    idle_timeout: float = flag(
        3600.0, "maximum seconds of a connection without a call; 0 for no limit", least=0
    )
    send_timeout: float = flag(
        60.0,
        "window in seconds in which a client must read responses at 500 bytes/s or more; 0 for no minimum",
        least=0,
    )
    keepalive_time: int = flag(
        7_200_000, "milliseconds without input before a client is pinged; 0 for never", least=0
    )
    keepalive_timeout: int = flag(
        20_000,
        "maximum milliseconds until a ping is answered; 0 for no limit",
        least=0,
    )
    keepalive_permit_without_calls: bool = flag(
        False, "send pings, and accept more than one in two hours, also without an open call"
    )
    http2_max_pings_without_data: int = flag(
        2, "maximum pings sent while nothing else is sent; 0 for no limit", least=0
    )
    http2_min_recv_ping_interval_without_data: int = flag(
        300_000,
        "minimum milliseconds between a client's pings while nothing is sent to it",
        least=0,
    )
    http2_max_ping_strikes: int = flag(
        2, "maximum early pings before GOAWAY; 0 for no limit", least=0
    )
    max_connection_age: int = flag(
        0,
        "milliseconds, spread by a tenth, until a connection gets GOAWAY; 0 for never",
        least=0,
    )
    max_connection_age_grace: int = flag(
        0, "milliseconds for its open calls after that; 0 for no limit", least=0
    )
    infer_response_compression_level: CompressionLevel = flag(
        "none",
        "compression of inference responses by gzip or deflate, at level 1, 6 or 9, if the client accepts "
        "it and the result is shorter",
        choices=get_args(CompressionLevel),
    )

    def __post_init__(self) -> None:
        check_flags(self)

    @property
    def times(self) -> tuple[float, ...]:
        """All timeouts, in seconds."""
        milliseconds = (
            self.keepalive_time,
            self.keepalive_timeout,
            self.max_connection_age,
            self.max_connection_age_grace,
        )
        seconds = (self.preface_timeout, self.message_timeout, self.idle_timeout, self.send_timeout)
        return (*seconds, *(time / 1000 for time in milliseconds))
