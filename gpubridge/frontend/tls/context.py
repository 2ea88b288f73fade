"""The certificates of an endpoint, as a context of OpenSSL's."""

from __future__ import annotations

import ssl
from pathlib import Path

from gpubridge.config import TlsSettings
from gpubridge.config.files import read_regular
from gpubridge.errors import invalid

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = b"PRIVATE KEY-----"


def read_context(settings: TlsSettings, protocol: str) -> ssl.SSLContext:
    """Read an endpoint's certificates, whose clients speak ``protocol``, an ALPN name.

    Raises BridgeError that names the file at fault.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([protocol])
    cert = _check_file(settings, "server_cert", _CERTIFICATE, "certificate")
    key = _check_file(settings, "server_key", _KEY, "private key")

    def refuse_password() -> str:
        raise invalid(f"{key} is encrypted: expected a key without a password")

    try:
        context.load_cert_chain(settings.server_cert, settings.server_key, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise invalid(f"{key} is not the key of {cert}") from error
        raise invalid(f"{cert} and {key} cannot be used: {_reason(error)}") from error
    if settings.use_ssl_mutual:
        root = _check_file(settings, "root_cert", _CERTIFICATE, "certificate")
        try:
            context.load_verify_locations(settings.root_cert)
        except ssl.SSLError as error:
            raise invalid(f"{root} cannot be used: {_reason(error)}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_file(settings: TlsSettings, field: str, mark: bytes, what: str) -> str:
    """Return how a file is called in errors, which can be read and looks like what it should be."""
    path = getattr(settings, field)
    name = f"{settings.flag_name(field)}={path}"
    try:
        content = read_regular(Path(path))
    except OSError as error:
        raise invalid(f"{name} cannot be read: {error.strerror or error}") from error
    if mark not in content:
        raise invalid(f"{name} holds no {what}: expected PEM")
    return name


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
