"""Pages that are one file: they run their own script only, and ask this server only."""

from __future__ import annotations

import base64
import hashlib
import re

from gpubridge.frontend.control import Answer

_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


def static_page(page: bytes, style: bytes = b"", script: bytes = b"") -> Answer:
    """Return the response with a page, whose policy allows its one script and its one style.

    - ``style``, ``script``: what is put at the beginning of the page's elements.

    What it shows was said by models and clients: the browser refuses to read any text as HTML.
    """
    page = page.replace(b"<style>", b"<style>" + style).replace(b"<script>", b"<script>" + script)
    policy = _POLICY.format(script=_digest("script", page), style=_digest("style", page))
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return Answer(page, fields.encode(), plain=False)


def _digest(tag: str, page: bytes) -> str:
    """Return the source of a policy that allows the one element of this kind."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
