"""Inference requests as forms (``multipart/form-data``, RFC 7578): each part is an element of an input.

Body and heads are read in one pass, without going back: a client chooses what is in them. (The parameters of a
head cost the standard library's ``email`` the square of their number.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from gpubridge.config import ModelConfig, TensorSpec
from gpubridge.errors import invalid
from gpubridge.model_io import InputForm, unexpected_input
from gpubridge.protocol.fields import check_parts, parse_json
from gpubridge.protocol.generate import deduced_shape, value_input
from gpubridge.protocol.infer_request import make_form
from gpubridge.protocol.request_form import RequestForm
from gpubridge.request import NO_CONTEXT, NO_OPTIONS
from gpubridge.tensor.datatypes import item_size
from gpubridge.tensor.strings import encode_strings

CONTENT_TYPE = b"content-type"
"""The header that says whether a body is a form."""
_TYPE = b"multipart/form-data"
_MOST_PARTS = 1024
_LONGEST_HEAD = 4096
"""Bytes of the head of a part."""
_LONGEST_BOUNDARY = 70
"""Characters of a boundary, by RFC 2046."""
_IDENTITY = (b"7bit", b"8bit", b"binary")
_PARAMETER = re.compile(rb';[ \t]*([\w!#$%&\'*+.^`|~-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s";]+))[ \t]*')
_ESCAPED = re.compile(rb'\\(["\\])')


class _Part(NamedTuple):
    """One part of a form; ``is_file``: whether it came with a file's name."""

    name: str
    content: bytes
    is_file: bool


def form_boundary(content_type: bytes | None) -> bytes | None:
    """Return the boundary of a form; None for a body of another type; raises BridgeError: INVALID_ARG."""
    if content_type is None or content_type[: len(_TYPE)].lower() != _TYPE:
        return None
    boundary = (_parameters(content_type[len(_TYPE) :]) or {}).get(b"boundary", b"")
    if not (boundary.isascii() and 0 < len(boundary) <= _LONGEST_BOUNDARY):
        raise invalid(
            "expected a boundary of 1 to 70 ASCII characters in the Content-Type of a form: leave that "
            "header to the client, as curl -F does"
        )
    return boundary


def parse_form(body: bytes, config: ModelConfig, boundary: bytes) -> RequestForm:
    """Return the request of a form; raises BridgeError: INVALID_ARG.

    Parts of one name are the elements of that input. A BYTES input takes their bytes. Another input takes
    the bytes of one file as they are, or JSON values of parts that are no files.
    """
    given: dict[str, list[_Part]] = {}
    for part in _parts(body, boundary):
        if part.name not in config.inputs_by_name:
            raise unexpected_input(part.name, config)
        given.setdefault(part.name, []).append(part)
    inputs = [_input(config.inputs_by_name[name], parts, config) for name, parts in given.items()]
    return make_form("", inputs, None, False, NO_CONTEXT, NO_OPTIONS, config)


def _input(spec: TensorSpec, parts: list[_Part], config: ModelConfig) -> InputForm:
    contents = [part.content for part in parts]
    if spec.datatype != "BYTES" and not any(part.is_file for part in parts):
        check_parts(b",".join(contents))
        values = [parse_json(content) for content in contents]
        return value_input(spec, values if len(values) > 1 else values[0], config)
    if spec.datatype == "BYTES":
        count, data = len(contents), encode_strings(contents)
    elif len(parts) > 1:
        raise invalid(f"input '{spec.name}' of a form: expected one file, got {len(parts)} parts")
    else:
        (data,) = contents
        size = item_size(spec.datatype) or 1
        count, rest = divmod(len(data), size)
        if rest:
            raise invalid(
                f"input '{spec.name}' of a form: expected a file of elements of {size} bytes "
                f"({spec.datatype}), got {len(data)} bytes"
            )
    shape = deduced_shape(spec, count, config)
    if shape is None:
        dims = [-1, *spec.dims] if config.max_batch_size else [*spec.dims]
        raise invalid(
            f"input '{spec.name}' of a form: expected as many elements as the shape {dims} has, got {count}"
        )
    return InputForm(spec.name, spec.datatype, shape, len(data), data)


def _parts(body: bytes, boundary: bytes) -> Iterator[_Part]:
    delimiter = b"--" + boundary
    at = 2 if body.startswith(b"\r\n") else 0
    if not body.startswith(delimiter, at):
        raise _malformed("it does not begin with its boundary")
    at += len(delimiter)
    for _ in range(_MOST_PARTS + 1):
        if body.startswith(b"--", at):
            return
        start = body.find(b"\r\n", at, at + _LONGEST_HEAD)
        if start < 0 or body[at:start].strip(b" \t"):
            raise _malformed("a line that begins with its boundary goes on")
        end = body.find(b"\r\n" + delimiter, start)
        if end < 0:
            raise _malformed("it ends before its last boundary")
        yield _part(body, start + 2, end)
        at = end + 2 + len(delimiter)
    raise invalid(f"expected a form of at most {_MOST_PARTS} parts, got more")


def _part(body: bytes, start: int, end: int) -> _Part:
    """Return the part between two boundaries; raises BridgeError."""
    split = body.find(b"\r\n\r\n", start, min(end, start + _LONGEST_HEAD))
    if split < 0:
        raise _malformed(f"a part has no empty line after a head of at most {_LONGEST_HEAD} bytes")
    fields = {}
    for line in body[start:split].split(b"\r\n"):
        field, _, value = line.partition(b":")
        fields[field.lower()] = value.strip(b" \t")
    kind, *_ = fields.get(b"content-disposition", b"").split(b";", 1)
    given = _parameters(fields.get(b"content-disposition", b"")[len(kind) :])
    if kind.strip().lower() != b"form-data" or given is None or b"name" not in given:
        raise _malformed('a part lacks Content-Disposition: form-data; name="INPUT"')
    name = given[b"name"].decode(errors="replace")
    if fields.get(b"content-transfer-encoding", b"binary").lower() not in _IDENTITY:
        raise _malformed(
            f"part '{name[:128]}' has a Content-Transfer-Encoding: send its bytes as they are"
        )
    return _Part(name, body[split + 4 : end], b"filename" in given or b"filename*" in given)


def _parameters(text: bytes) -> dict[bytes, bytes] | None:
    """Return the parameters of a header's value, by names in small letters; None if they are malformed."""
    found: dict[bytes, bytes] = {}
    text = text.strip(b" \t")
    at = 0
    while at < len(text):
        match = _PARAMETER.match(text, at)
        if match is None or match[1].lower() in found:
            return None
        found[match[1].lower()] = _ESCAPED.sub(rb"\1", match[2]) if match[3] is None else match[3]
        at = match.end()
    return found


def _malformed(fault: str) -> Exception:
    return invalid(f"the body is no form (multipart/form-data): {fault}")
