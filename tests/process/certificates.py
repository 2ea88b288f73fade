"""Certificates for tests of TLS, and flags that name them."""

from datetime import datetime, timedelta, timezone
from pathlib import Path

HOSTS = ("localhost", "127.0.0.1")


class Authority:
    """One that signs certificates; writes everything as files into a directory."""

    def __init__(self, directory: Path, name: str = "root") -> None:
        import trustme

        self._ca = trustme.CA()
        self._directory = directory
        self.root = directory / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.root))

    def issue(self, name: str, *hosts: str, expired: bool = False) -> tuple[Path, Path]:
        """Write a certificate, of this machine if no host is given; returns its file and the key's."""
        end = datetime.now(timezone.utc) - timedelta(days=1) if expired else None
        issued = self._ca.issue_cert(*(hosts or HOSTS), not_after=end)
        cert, key = self._directory / f"{name}.cert.pem", self._directory / f"{name}.key.pem"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return cert, key


def tls_flags(files: tuple[Path, Path], root: Path | None = None) -> list[str]:
    """Return the flags that serve HTTP and gRPC with a certificate; mutually with a root."""
    cert, key = files
    flags = []
    for server in ("http", "grpc"):
        flags += [f"--{server}-server-cert={cert}", f"--{server}-server-key={key}"]
        flags += [f"--{server}-use-ssl=true"] if root is None else []
        if root is not None:
            flags += [f"--{server}-use-ssl-mutual=true", f"--{server}-root-cert={root}"]
    return flags
