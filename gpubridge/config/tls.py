"""Flags of TLS: the same for HTTP and gRPC, named as Triton's for gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gpubridge.errors import invalid
from gpubridge.flags import flag


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Certificates of one endpoint; their files are read when it opens."""

    flag_prefix: ClassVar[str]

    use_ssl: bool = flag(
        False, "serve TLS only; its files are read again on SIGHUP, for new connections"
    )
    use_ssl_mutual: bool = flag(
        False, "serve TLS only, to clients with a certificate that the root certificate has signed"
    )
    server_cert: str = flag(
        "", "the server's certificate, with those between it and the root; PEM", metavar="FILE"
    )
    server_key: str = flag("", "its private key, without a password; PEM", metavar="FILE")
    root_cert: str = flag(
        "", "certificates that sign those of clients for mutual TLS; PEM", metavar="FILE"
    )

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
        """Give a sentence for each flag that was given and has no effect."""
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
    """Those of HTTP; metrics are served without TLS."""

    flag_prefix: ClassVar[str] = "http-"
    flag_group: ClassVar[str] = "HTTP"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcTls(TlsSettings):
    """Those of gRPC."""

    flag_prefix: ClassVar[str] = "grpc-"
    flag_group: ClassVar[str] = "gRPC"
