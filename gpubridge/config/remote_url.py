"""URLs of model repositories in object storage, with Triton's forms and credentials."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpubridge.errors import invalid

SCHEMES = {"s3": "s3", "gs": "gs", "az": "az", "as": "az"}
"""Protocols of fsspec by the schemes of URLs; ``as`` is Triton's for Azure."""

EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}
"""The extra of the package that each protocol needs."""

CREDENTIAL_VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"
_FORMS = "s3://BUCKET/PATH, s3://[https://]HOST:PORT/BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or as://ACCOUNT/CONTAINER/PATH"  # fmt: skip
_SERVER = re.compile(
    r"(?:(?P<scheme>https?)://(?P<named>[^/]+)|(?P<plain>[^/]+:[0-9]+))/(?P<path>.*)"
)
_S3_NAMES = {
    "key": "key_id",
    "secret": "secret_key",
    "token": "session_token",
    "profile": "profile",
}
"""Options of s3fs, and their names in Triton's file of credentials."""


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """The URL of a model repository in object storage.

    - ``text``: as it was given.
    - ``protocol``: of fsspec.
    - ``path``: the bucket and the folder in it.
    - ``server``: URL of an S3 server; empty for Amazon's.
    - ``account``: of Azure; empty for the environment's.
    """

    text: str
    protocol: str
    path: str
    server: str = ""
    account: str = ""

    def __str__(self) -> str:
        return self.text


def read_remote_url(text: str) -> RemoteUrl:
    """Parse a URL; raises BridgeError: INVALID_ARG."""
    scheme, _, path = text.partition("://")
    server = account = ""
    if scheme == "s3" and (match := _SERVER.fullmatch(path)):
        path = match["path"]
        server = f"{match['scheme'] or 'http'}://{match['named'] or match['plain']}"
    elif scheme == "as":
        account, _, path = path.partition("/")
        account = account.partition(".")[0]
    path = path.rstrip("/")
    parts = path.split("/")
    if scheme not in SCHEMES or not all(parts) or {".", ".."}.intersection(parts):
        raise invalid(f"expected a directory, {_FORMS}, got {text!r}")
    return RemoteUrl(text.rstrip("/"), SCHEMES[scheme], path, server, account)


def storage_options(url: RemoteUrl, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of fsspec's file system: the server, and credentials as Triton finds them.

    Without any, the cloud's own library looks for them. Reads the file of credentials, so not for the
    event loop. Raises BridgeError: INVALID_ARG for that file.
    """
    credential = _credential(url, environ.get(CREDENTIAL_VARIABLE, ""))
    if url.protocol == "gs":
        return {"token": credential} if credential else {}
    fields = credential if isinstance(credential, dict) else {}
    if url.protocol == "s3":
        options = {ours: fields.get(theirs) for ours, theirs in _S3_NAMES.items()}
        options["endpoint_url"] = url.server
        client = {"region_name": fields["region"]} if fields.get("region") else {}
        times = {"connect_timeout": 5, "read_timeout": 30, "retries": {"total_max_attempts": 2}}
        return {**_given(options), "client_kwargs": client, "config_kwargs": times}
    account = url.account or fields.get("account_str") or environ.get("AZURE_STORAGE_ACCOUNT")
    key = fields.get("account_key") or environ.get("AZURE_STORAGE_KEY")
    kind = fields.get("auth_type") or environ.get("AZURE_STORAGE_AUTH_TYPE")
    # Without a key, adlfs asks azure-identity's default chain.
    return _given({"account_name": account, "account_key": None if kind else key})


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value}


def _credential(url: RemoteUrl, path: str) -> Any:
    """Return the entry of Triton's file with the longest name that the URL begins with, or None."""
    if not path:
        return None
    section = "as" if url.protocol == "az" else url.protocol
    try:
        entries = json.loads(Path(path).read_bytes()).get(section, {})
        names = [name for name in entries if url.text.startswith(name)]
        entry = entries[max(names, key=len)] if names else None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        # Not its text, which may quote a secret.
        why = error.strerror if isinstance(error, OSError) else "it is no JSON in Triton's form"
        raise invalid(f"{CREDENTIAL_VARIABLE} {path} cannot be read: {why}") from None
    if entry is not None and not isinstance(entry, str if section == "gs" else dict):
        raise invalid(f"{CREDENTIAL_VARIABLE} {path}: {section!r} has an entry of a wrong type")
    return entry
