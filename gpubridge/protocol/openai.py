"""OpenAI's API: checks of requests, the inputs of models, and the encoding of their answers."""

from __future__ import annotations

import base64
import codecs
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import orjson

from gpubridge.config import (
    EMBEDDING_OUTPUT,
    FIELDS_OUTPUT,
    REQUEST_INPUT,
    TEXT_INPUT,
    TEXT_OUTPUT,
    ModelConfig,
    openai_endpoints,
)
from gpubridge.errors import BridgeError, ErrorCode, Pieces, QueueFull
from gpubridge.model_io import InputForm
from gpubridge.protocol.fields import MOST_MEMBERS, check_parts
from gpubridge.protocol.generate import generate_form
from gpubridge.protocol.infer_request import make_form
from gpubridge.protocol.json_tensor import data_to_json
from gpubridge.protocol.request_form import LENGTH_BYTES, RequestForm
from gpubridge.protocol.status import http_status
from gpubridge.request import NO_CONTEXT, NO_OPTIONS, InferResponse
from gpubridge.tensor.strings import decode_strings

_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_FIELDS = {"message": dict, "finish_reason": str, "usage": dict, "logprobs": dict}
"""Members of `FIELDS_OUTPUT`."""
_OWN = ("id", "model", "prompt", "input")
"""Members of a body that a model with `TEXT_INPUT` does not get as parameters."""
_FLOAT_BYTES = 4
_MOST_VALUES = 1 << 19
"""Values of a body: of OpenAI's own, 300,000 tokens."""
_Decoder = codecs.getincrementaldecoder("utf-8")


class OpenAiError(BridgeError):
    """A request refused in the terms of OpenAI's API."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message, ErrorCode.INVALID_ARG)
        self.param = param
        self.openai_code = code
        self.status = status

    def copy(self) -> OpenAiError:
        """Return a copy without a traceback."""
        return OpenAiError(self.message, self.param, self.openai_code, self.status)


def openai_failure(error: BridgeError, status: int | None) -> tuple[int, Pieces]:
    """Return the status of an error, unless one is given, and its JSON body."""
    param, code = None, None
    if isinstance(error, OpenAiError):
        status, param, code = error.status, error.param, error.openai_code
    elif isinstance(error, QueueFull):
        status, code = 429, "rate_limit_exceeded"
    elif status == 401:
        code = "invalid_api_key"
    status = status or http_status(error.code)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    text = error.told.encode(errors="replace").decode()
    members = {"message": text, "type": kind, "param": param, "code": code}
    return status, [orjson.dumps({"error": members})]


def unix_seconds() -> int:
    """Return the time of day, as the API counts it."""
    return time.time_ns() // 1_000_000_000


def unknown_model(name: str) -> OpenAiError:
    """Return the error for a model that is not there, or serves nothing of this API."""
    return OpenAiError(
        f"The model '{name}' does not exist or serves nothing of this API",
        "model",
        "model_not_found",
        404,
    )


def model_entry(name: str, created: int) -> dict[str, object]:
    """Return a model as the API lists it."""
    return {"id": name, "object": "model", "created": created, "owned_by": "gpubridge"}


# -- requests ----------------------------------------------------------------------------------------

_GENERATION = {
    "model": str,
    "stream": bool,
    "stream_options": dict,
    "n": int,
    "temperature": float,
    "top_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "max_tokens": int,
    "seed": int,
    "user": str,
}
_MEMBERS: Mapping[str, Mapping[str, type]] = {
    "chat": {
        **_GENERATION,
        "max_completion_tokens": int,
        "messages": list,
        "response_format": dict,
        "tools": list,
    },
    "completions": _GENERATION,
    "embeddings": {"model": str, "dimensions": int, "encoding_format": str, "user": str},
}
_LIMITS = ("max_tokens", "max_completion_tokens")
_REQUIRED = {"chat": "messages", "completions": "prompt", "embeddings": "input"}
_EXPECTED = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "an array",
    str: "a string",
}


class OpenAiModel:
    """Facts that the API needs of a model, by its configuration.

    - ``endpoints``: those that it serves.
    - ``body_form``: the form of a request with an empty body, for a model whose input is the body.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.endpoints = openai_endpoints(config)
        self.body_form: RequestForm | None = None
        spec = config.inputs_by_name.get(REQUEST_INPUT)
        if self.endpoints and spec is not None:
            shape = (1,) * (len(spec.dims) + bool(config.max_batch_size))
            empty = InputForm(REQUEST_INPUT, "BYTES", shape, LENGTH_BYTES, bytes(LENGTH_BYTES))
            self.body_form = make_form("", [empty], None, False, NO_CONTEXT, NO_OPTIONS, config)


class OpenAiRequest:
    """A checked request; raises BridgeError for another one.

    - ``endpoint``: chat, completions or embeddings.

    Members with null count as absent, unknown members are the model's.
    """

    def __init__(self, body: bytes, endpoint: str) -> None:
        try:
            check_parts(body, _MOST_VALUES)
            document = orjson.loads(body)
        except BridgeError as error:
            raise OpenAiError(error.message) from error
        except orjson.JSONDecodeError as error:
            raise OpenAiError(f"expected a JSON body: {error.msg} at {error.pos}") from error
        if type(document) is not dict:
            raise OpenAiError("expected a JSON object as the body")
        self._body = body
        if None in document.values():
            document = {name: value for name, value in document.items() if value is not None}
        members = self._members = document
        self.endpoint = endpoint
        for name in ("model", _REQUIRED[endpoint]):
            if name not in members:
                raise OpenAiError(f"Missing required parameter: '{name}'.", name)
        known = _MEMBERS[endpoint]
        for name, value in members.items():
            wanted, given = known.get(name), type(value)
            if wanted is not None and given is not wanted and (wanted, given) != (float, int):
                raise _wrong(name, _EXPECTED[wanted])
        self.model: str = members["model"]
        self.stream: bool = endpoint != "embeddings" and members.get("stream", False)
        options = members.get("stream_options", {}) if self.stream else {}
        self.with_usage: bool = options.get("include_usage") is True
        self._check()

    def _check(self) -> None:
        """Check values beyond their types."""
        members = self._members
        if self.endpoint == "embeddings":
            if members.get("encoding_format") not in (None, "float", "base64"):
                raise _wrong("encoding_format", "float or base64")
        else:
            self._check_generation()
        name = _REQUIRED[self.endpoint]
        _check_lengths(name, members[name])
        if self.endpoint != "chat":
            if not _is_prompts(members[name]):
                raise _wrong(name, "a string, or a non-empty array of strings or of token numbers")
            return
        if not members[name]:
            raise _wrong(name, "a non-empty array")
        for index, message in enumerate(members[name]):
            _check_message(f"messages[{index}]", message)

    def _check_generation(self) -> None:
        members = self._members
        if members.get("n", 1) != 1:
            raise _wrong("n", "1, the number of choices")
        if "stream_options" in members and not self.stream:
            raise _wrong("stream_options", "'stream': true beside it")
        for limit in _LIMITS:
            if limit in members and limit in _MEMBERS[self.endpoint] and members[limit] < 0:
                raise _wrong(limit, "an integer of 0 or more")

    @property
    def rows(self) -> int:
        """Return the number of embeddings to answer with."""
        given = self._members["input"]
        return 1 if type(given) is str or _has_only(given, int) else len(given)

    @property
    def base64(self) -> bool:
        """Return whether embeddings are base64, not arrays of numbers."""
        return self._members.get("encoding_format") == "base64"

    def body_form(self, model: OpenAiModel) -> RequestForm | None:
        """Return the form of a request for a model whose input is the body; None for another model.

        Raises BridgeError for a model that does not serve the endpoint.
        """
        if self.endpoint not in model.endpoints:
            raise OpenAiError(
                f"The model '{self.model}' does not serve {self.endpoint}", "model", None, 404
            )
        return model.body_form

    def form(self, identifier: str, model: OpenAiModel) -> RequestForm:
        """Return the inputs for a model; raises BridgeError."""
        form = self.body_form(model)
        if form is None:
            return generate_form(self._generate_members(model.config), model.config, identifier)
        data = len(self._body).to_bytes(LENGTH_BYTES, "little") + self._body
        entries = [replace(form.inputs[0], nbytes=len(data), data=data)]
        places = ((0, len(data)),)
        return replace(form, identifier=identifier, inputs=entries, sent=entries, places=places)

    def _generate_members(self, config: ModelConfig) -> dict[str, Any]:
        """Return the members of a generate request: the text, and the other scalars of the body."""
        name = _REQUIRED[self.endpoint]
        text = self._members[name]
        texts = [text] if type(text) is str else text
        if not _has_only(texts, str) or (self.endpoint == "completions" and len(texts) > 1):
            wanted = "one string" if self.endpoint == "completions" else "strings"
            raise _wrong(name, f"{wanted}, which this model takes")
        members = {
            key: value
            for key, value in self._members.items()
            if type(value) in (bool, int, float, str) and key not in _OWN
        }
        if "exclude_input_in_output" in config.inputs_by_name:
            members.setdefault("exclude_input_in_output", True)
        return {**members, TEXT_INPUT: texts}


def _wrong(name: str, wanted: str) -> OpenAiError:
    return OpenAiError(f"Invalid value for '{name}': expected {wanted}.", name)


def _check_lengths(name: str, value: Any) -> None:
    """Refuse an array, or one in it, of more elements than a request may have."""
    arrays = (value, *value) if type(value) is list else ()
    length = max((len(each) for each in arrays if type(each) is list), default=0)
    if length > MOST_MEMBERS:
        raise _wrong(name, f"arrays of at most {MOST_MEMBERS} elements, got {length}")


def _has_only(values: Any, kind: type) -> bool:
    return type(values) is list and bool(values) and all(type(each) is kind for each in values)


def _is_prompts(value: Any) -> bool:
    several = _has_only(value, list) and all(_has_only(each, int) for each in value)
    return type(value) is str or _has_only(value, str) or _has_only(value, int) or several


def _check_message(where: str, message: Any) -> None:
    if type(message) is not dict:
        raise _wrong(where, "an object")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(_ROLES)}")
    if content is None and role == "assistant":
        return
    typed = type(content) is list and all(
        type(part) is dict and type(part.get("type")) is str for part in content
    )
    if type(content) is not str and not typed:
        raise _wrong(f"{where}.content", "a string, or an array of objects with a type")


# -- answers -----------------------------------------------------------------------------------------


class OpenAiAnswer:
    """The answer to one request, from the model's responses in order.

    - ``identifier``: of the answer, and of the request to the model.
    - ``nbytes``: the size of the responses so far.
    """

    def __init__(self, request: OpenAiRequest) -> None:
        self._request = request
        self._chat = request.endpoint == "chat"
        prefix = "chatcmpl-" if self._chat else "cmpl-"
        self.identifier = prefix + os.urandom(16).hex()
        self._created = unix_seconds()
        # A character may be cut by the end of a piece.
        self._decode = _Decoder("replace").decode
        self._texts: list[str] = []
        self._message: dict[str, Any] = {}
        self._fields: dict[str, Any] = {}
        self.nbytes = 0
        self._begun = self._calls = False
        self._rows: list[memoryview] = []
        if request.stream:
            # Of each event around its choice.
            self._opening = b'data: %b,"choices":[' % orjson.dumps(self._head(streamed=True))[:-1]
            self._ending = b'],"usage":null}\n\n' if request.with_usage else b"]}\n\n"

    def add(self, response: InferResponse) -> Pieces:
        """Take a response of the model; return its events for a client that streams.

        Raises BridgeError: INTERNAL for a response that breaks the convention.
        """
        delta: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        tensors = zip(response.signature.tensors, response.shapes, response.buffers, strict=True)
        for spec, shape, buffer in tensors:
            self.nbytes += len(buffer)
            if spec.name == EMBEDDING_OUTPUT and self._request.endpoint == "embeddings":
                self._add_rows(spec.datatype, shape, buffer)
            elif spec.name == FIELDS_OUTPUT:
                fields = self._read_fields(_joined(buffer))
                merge(delta, fields.pop("message", {}))
            elif spec.name == TEXT_OUTPUT:
                text = self._decode(_joined(buffer))
                delta["content"] = delta["content"] + text if "content" in delta else text
        self._calls = self._calls or bool(delta.get("tool_calls"))
        self._fields.update(fields)
        if not self._request.stream:
            # Joined at the end: to merge each piece would copy those before it.
            self._texts.append(delta.pop("content", ""))
            if delta:
                merge(self._message, delta)
            return ()
        if not delta and "finish_reason" not in fields:
            return ()
        return [self._chunk(self._delta(delta), fields.get("finish_reason"))]

    def rest(self) -> Pieces:
        """Return the last events of a stream."""
        pieces = []
        left = self._decode(b"", final=True)
        if left or "finish_reason" not in self._fields:
            pieces.append(
                self._chunk(self._delta({"content": left} if left else {}), self._reason())
            )
        if self._request.with_usage:
            members = {**self._head(streamed=True), "choices": [], "usage": self._usage()}
            pieces.append(_event(orjson.dumps(members)))
        return [*pieces, _event(b"[DONE]")]

    def whole(self) -> Pieces:
        """Return the answer for a client that does not stream; raises BridgeError."""
        if self._request.endpoint == "embeddings":
            return [orjson.dumps(self._embeddings())]
        content = "".join([*self._texts, self._decode(b"", final=True)])
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            for call in self._message.get("tool_calls", ()):
                call.pop("index", None)
            message = choice["message"] = {"role": "assistant", **self._message}
            message["content"] = content or (None if self._calls else "")
        else:
            choice["text"] = content
        choice["logprobs"] = self._fields.get("logprobs")
        choice["finish_reason"] = self._reason()
        return [orjson.dumps({**self._head(), "choices": [choice], "usage": self._usage()})]

    def _head(self, *, streamed: bool = False) -> dict[str, Any]:
        kind = "text_completion"
        if self._chat:
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {
            "id": self.identifier,
            "object": kind,
            "created": self._created,
            "model": self._request.model,
        }

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return what a streamed choice has beside its index: the first one of a chat names the role."""
        if not self._chat:
            return {"text": delta.get("content", "")}
        for index, call in enumerate(delta.get("tool_calls", ())):
            call.setdefault("index", index)
        if not self._begun:
            self._begun = True
            delta = {"role": "assistant", "content": "", **delta}
        return {"delta": delta}

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> bytes:
        choice = {
            "index": 0,
            **delta,
            "logprobs": self._fields.pop("logprobs", None),
            "finish_reason": reason,
        }
        return b"%b%b%b" % (self._opening, orjson.dumps(choice), self._ending)

    def _reason(self) -> str:
        reason: str = self._fields.get("finish_reason", "tool_calls" if self._calls else "stop")
        return reason

    def _usage(self) -> dict[str, Any] | None:
        usage: dict[str, Any] | None = self._fields.get("usage")
        if usage is None:
            return None
        counts = [usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")]
        total = sum(counts) if all(type(count) is int for count in counts) else 0
        return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": total, **usage}

    def _read_fields(self, text: bytes) -> dict[str, Any]:
        try:
            fields = orjson.loads(text)
        except orjson.JSONDecodeError:
            fields = None
        if type(fields) is not dict:
            raise self._broken(f"expected a JSON object in '{FIELDS_OUTPUT}'")
        for name, value in fields.items():
            if type(value) is not _FIELDS.get(name):
                raise self._broken(
                    f"expected {', '.join(_FIELDS)} in '{FIELDS_OUTPUT}', got '{name}' of "
                    f"{type(value).__name__}"
                )
        message = fields.get("message", {})
        calls = message.get("tool_calls")
        if type(message.get("content", "")) is not str or not (
            calls is None or _has_only(calls, dict)
        ):
            raise self._broken(
                f"expected a string as content and objects as tool_calls in '{FIELDS_OUTPUT}'"
            )
        return fields

    def _broken(self, text: str) -> BridgeError:
        return BridgeError(f"model '{self._request.model}': {text}", ErrorCode.INTERNAL)

    def _add_rows(self, datatype: str, shape: Iterable[int], buffer: memoryview) -> None:
        *_, dim = 0, *shape
        width = dim * _FLOAT_BYTES
        if datatype != "FP32" or not width:
            raise self._broken(f"expected rows of FP32 in '{EMBEDDING_OUTPUT}', got {datatype}")
        cuts = range(0, len(buffer) + 1, width)
        self._rows += [memoryview(bytes(buffer[begin:end])) for begin, end in pairwise(cuts)]

    def _embeddings(self) -> dict[str, Any]:
        wanted = self._request.rows
        if len(self._rows) != wanted:
            raise self._broken(
                f"expected {wanted} rows in '{EMBEDDING_OUTPUT}', got {len(self._rows)}"
            )
        rows = (
            base64.b64encode(row).decode()
            if self._request.base64
            else orjson.Fragment(
                data_to_json(EMBEDDING_OUTPUT, "FP32", len(row) // _FLOAT_BYTES, row)
            )
            for row in self._rows
        )
        usage = self._usage() or {"prompt_tokens": 0, "total_tokens": 0}
        usage.pop("completion_tokens", None)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": row}
                for index, row in enumerate(rows)
            ],
            "model": self._request.model,
            "usage": usage,
        }


def merge(whole: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Merge a piece of a message into it as clients do: texts are joined, and entries of equal index."""
    for name, value in delta.items():
        known = whole.get(name)
        if type(known) is str and type(value) is str and name not in ("id", "type", "role"):
            whole[name] = known + value
        elif type(known) is dict and type(value) is dict:
            merge(known, value)
        elif type(known) is list and type(value) is list:
            _merge_entries(known, value)
        else:
            whole[name] = value


def _merge_entries(known: list[Any], entries: list[Any]) -> None:
    """Merge entries that have the index of a known one, append the others."""
    indices = {_index(each): each for each in known}
    for entry in entries:
        index = _index(entry)
        if index is not None and index in indices:
            merge(indices[index], entry)
        else:
            known.append(entry)


def _index(entry: Any) -> int | None:
    index = entry.get("index") if type(entry) is dict else None
    return index if type(index) is int else None


def _joined(buffer: memoryview) -> bytes:
    """Return the elements of a BYTES tensor as one."""
    if len(buffer) >= LENGTH_BYTES and _length(buffer) == len(buffer) - LENGTH_BYTES:
        # One element, as of most pieces of a stream.
        return bytes(buffer[LENGTH_BYTES:])
    return b"".join(decode_strings(bytes(buffer)))


def _length(buffer: memoryview) -> int:
    return int.from_bytes(buffer[:LENGTH_BYTES], "little")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
