"""A certificate for a server under measurement; its clients do not check it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from gpubridge.errors import BridgeError

__all__ = ["tls_flags"]


def tls_flags(folder: Path) -> list[str]:
    """Return the flags by which either server speaks gRPC over TLS; the files go into ``folder``."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    if not cert.exists():
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        command += ["-subj", "/CN=localhost", "-keyout", str(key), "-out", str(cert)]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BridgeError(f"a certificate needs openssl on PATH: {error}") from error
    return ["--grpc-use-ssl=true", f"--grpc-server-cert={cert}", f"--grpc-server-key={key}"]
