"""The HTTP session of S3's client, which follows no redirect."""

from __future__ import annotations

import importlib
from typing import Any
from urllib.parse import urlsplit

_HOST_LENGTH = 255


class _Unredirected:
    """Sends the requests of a session of aiohttp to the hosts they are for, and to no other.

    Botocore signs anew for the region of a bucket that S3 names, at an endpoint that it knows.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, *request: Any, **how: Any) -> Any:
        """Send a request; return the response; raises OSError for a redirect."""
        response = await self._session.request(*request, **how, allow_redirects=False)
        location = response.headers.get("Location")
        if location is None or response.status < 300 or "x-amz-bucket-region" in response.headers:
            return response
        response.close()
        host = urlsplit(location).netloc[:_HOST_LENGTH] or response.url.authority
        raise OSError(
            f"expected an answer of {response.url.authority}, got a redirect to {host!r}, "
            "which is not followed: name that server in the URL"
        )


def session_class() -> type[Any]:
    """Return a class of sessions for ``http_session_cls`` of aiobotocore's configuration.

    Without it, aiohttp sends a request on to any host that an answer names, with the session token.
    """
    base: Any = importlib.import_module("aiobotocore.httpsession").AIOHTTPSession

    class Session(base):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> _Unredirected:
            return _Unredirected(await super()._get_session(proxy_url))

    return Session
