"""Works that every server is given, as each server's clients send them, and the check of the answers.

A dialect is the form of requests: ``v2`` of gpubridge, Triton and PyTriton, ``mlserver`` (the same without binary
tensors), and plain JSON with an image as base64 (``base64``), as a form (``form``) or as the body (``body``).
"""

from __future__ import annotations

import base64
import functools
import http.client
import io
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.traffic import TURN, Request, Traffic, binary_request, json_request, raw_request
from gpubridge.errors import BridgeError

__all__ = ["TOKENS", "WORKS", "Answer", "NotReadyError", "Work", "ask", "photograph"]

#: How many pieces an answer of the stream has.
TOKENS = 100
_PATHS = {"v2": "/v2/models/{}/infer", "mlserver": "/v2/models/{}/infer"}
_COMMENT_AT = 6
_COMMENT_BYTES = 30
_JPEG_BYTES = 100_000
_BOUNDARY = "gpubridge-boundary"


class NotReadyError(BridgeError):
    """A server that gives no answer, or another status than 200, as it does while it starts."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The status, the length of the JSON before binary tensors (None without such), and the body."""

    status: int
    header_length: int | None
    body: bytes

    def outputs(self) -> dict[str, list[float]]:
        """Return the values of each output of a protocol v2 or plain answer."""
        length = len(self.body) if self.header_length is None else self.header_length
        document = json.loads(self.body[:length])
        if "outputs" not in document:
            return dict(document)
        found = {}
        for output in document["outputs"]:
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                found[output["name"]] = output["data"]
            else:
                found[output["name"]] = np.frombuffer(self.body, "<f4", size // 4, length).tolist()
                length += size
        return found

    def text(self) -> str:
        """Return the text of a stream: of events, or as it is."""
        if not self.body.startswith(b"data: "):
            return self.body.decode()
        events = [
            json.loads(line[6:]) for line in self.body.splitlines() if line.startswith(b"data: ")
        ]
        return "".join(
            event["outputs"][0]["data"][0] if "outputs" in event else event["text_output"]
            for event in events
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked, and what is right; ``unit`` is what a figure is per."""

    name: str
    title: str
    unit: str
    connections: int
    request: Callable[[str], Request]
    wrong: Callable[[bytes, Answer], str]
    responses: int = 1

    def traffic(self, dialect: str) -> Traffic:
        """Return the traffic for a server."""
        return Traffic([self.request(dialect)], (), responses=self.responses)

    def check(self, dialect: str, port: int, turn: int) -> None:
        """Ask once; BridgeError unless the answer is right, and NotReadyError if there is none."""
        sent = self.request(dialect).filled(turn)
        try:
            answer = ask(sent, port)
        except (OSError, http.client.HTTPException) as error:
            raise NotReadyError(f"{self.name}: no answer on port {port}: {error!r}") from error
        if answer.status != http.client.OK:
            raise NotReadyError(f"{self.name}: status {answer.status}: {answer.body[:300]!r}")
        if found := self.wrong(sent.partition(b"\r\n\r\n")[2], answer):
            raise BridgeError(f"{self.name}: {found}; the answer: {answer.body[:300]!r}")


def ask(request: bytes, port: int) -> Answer:
    """Send a request to 127.0.0.1:``port``."""
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", first.split()[1], body, headers)
        response = connection.getresponse()
        length = response.headers.get("Inference-Header-Content-Length")
        return Answer(response.status, int(length) if length else None, response.read())
    finally:
        connection.close()


@functools.cache
def photograph() -> bytes:
    """Return a JPEG of about 100 KB, whose comment has room for a number."""
    from PIL import Image  # noqa: PLC0415  (only this work needs it)

    numbers = np.random.default_rng(7)
    coarse = numbers.integers(0, 256, (24, 32, 3), np.uint8)
    smooth = Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC)
    noise = numbers.integers(0, 24, (480, 640, 3))
    pixels = np.clip(np.asarray(smooth, np.int64) + noise, 0, 255).astype(np.uint8)
    qualities = range(60, 96)
    sizes = {}
    for quality in qualities:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=quality)
        sizes[quality] = file.getvalue()
    data = min(sizes.values(), key=lambda each: abs(len(each) - _JPEG_BYTES))
    comment = b"\xff\xfe" + (2 + _COMMENT_BYTES).to_bytes(2, "big") + b"0" * _COMMENT_BYTES
    return data[:2] + comment + data[2:]


def _add_sub(dialect: str) -> Request:
    numbers = {
        name: ",".join(f"{first + index}@@@@@@.5" for index in range(8))
        for name, first in (("INPUT0", 1), ("INPUT1", 2))
    }
    if dialect in _PATHS:
        inputs = ",".join(
            f'{{"name":"{name}","datatype":"FP32","shape":[8],"data":[{data}]}}'
            for name, data in numbers.items()
        )
        return json_request(_PATHS[dialect].format("add_sub"), f'{{"inputs":[{inputs}]}}')
    document = ",".join(f'"{name}":[{data}]' for name, data in numbers.items())
    return json_request("/add_sub", f"{{{document}}}")


def _wrong_sum(sent: bytes, answer: Answer) -> str:
    document = json.loads(sent)
    given = document
    if "inputs" in document:
        given = {each["name"]: each["data"] for each in document["inputs"]}
    left, right = (np.array(given[name], np.float32) for name in ("INPUT0", "INPUT1"))
    return _differs(answer, {"OUTPUT0": left + right, "OUTPUT1": left - right}, 0.0)


def _means(dialect: str) -> Request:
    jpeg = bytearray(photograph())
    if dialect in ("mlserver", "base64"):
        text = base64.b64encode(jpeg).decode()
        # Four letters stand for three bytes; these are of the comment.
        at = _COMMENT_AT // 3 * 4
        text = f"{text[:at]}{'@' * 12}{text[at + 12 :]}"
        if dialect == "base64":
            return json_request("/means", f'{{"IMAGE":"{text}"}}')
        given = '"datatype":"BYTES","shape":[1],"parameters":{"content_type":"base64"}'
        document = f'{{"inputs":[{{"name":"IMAGE",{given},"data":["{text}"]}}]}}'
        return json_request("/v2/models/means/infer", document)
    jpeg[_COMMENT_AT : _COMMENT_AT + len(TURN)] = TURN.encode()
    if dialect == "v2":
        return binary_request("means", {"IMAGE": bytes(jpeg)}, ("MEANS",))
    if dialect == "body":
        return raw_request("/means", "image/jpeg", bytes(jpeg))
    part = 'Content-Disposition: form-data; name="IMAGE"; filename="image.jpg"'
    opening = f"--{_BOUNDARY}\r\n{part}\r\nContent-Type: image/jpeg\r\n\r\n".encode()
    body = opening + bytes(jpeg) + f"\r\n--{_BOUNDARY}--\r\n".encode()
    return raw_request("/means", f"multipart/form-data; boundary={_BOUNDARY}", body)


def _wrong_means(sent: bytes, answer: Answer) -> str:
    from PIL import Image  # noqa: PLC0415  (only this work needs it)

    del sent
    image = Image.open(io.BytesIO(photograph())).convert("RGB")
    scaled = np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR), np.float32)
    return _differs(answer, {"MEANS": scaled.mean(axis=(0, 1))}, 1.0)


def _tokens(dialect: str) -> Request:
    prompt = f"Count from the number {TURN}"
    if dialect == "mlserver":
        given = f'"name":"text_input","datatype":"BYTES","shape":[1],"data":["{prompt}"]'
        return json_request("/v2/models/tokens/generate_stream", f'{{"inputs":[{{{given}}}]}}')
    path = "/v2/models/tokens/generate_stream" if dialect == "v2" else "/tokens"
    return json_request(path, f'{{"text_input":"{prompt}"}}')


def _wrong_text(sent: bytes, answer: Answer) -> str:
    document = json.loads(sent)
    prompt = document["inputs"][0]["data"][0] if "inputs" in document else document["text_input"]
    number = prompt.split()[-1]
    expected = "".join(f"{number}:{index} " for index in range(TOKENS))
    try:
        text = answer.text()
    except (ValueError, KeyError, IndexError) as error:
        return f"no stream of text: {error!r}"
    return "" if text == expected else f"expected {TOKENS} pieces {expected[:40]} ..."


def _differs(answer: Answer, expected: dict[str, NDArray[np.float32]], by: float) -> str:
    """Return what is not as expected; values may differ by so much."""
    try:
        outputs = {name: np.array(values, np.float32) for name, values in answer.outputs().items()}
    except (ValueError, KeyError, TypeError) as error:
        return f"no outputs: {error!r}"
    for name, values in expected.items():
        got = outputs.get(name)
        if got is None or got.ravel().shape != values.shape:
            return f"expected output {name} of {values.shape[0]} numbers"
        if np.abs(got.ravel() - values).max() > by:
            return f"expected {name} {values.tolist()}"
    return ""


WORKS: tuple[Work, ...] = (
    Work(
        "add_sub",
        "JSON in and out: sum and difference of 8 numbers, 16 connections",
        "request",
        16,
        _add_sub,
        _wrong_sum,
    ),
    Work(
        "means",
        "a JPEG of 100 KB to a Pillow model, 4 connections",
        "request",
        4,
        _means,
        _wrong_means,
    ),
    Work(
        "tokens",
        f"a stream of {TOKENS} tokens, 4 connections",
        "token",
        4,
        _tokens,
        _wrong_text,
        responses=TOKENS,
    ),
)
