"""Turns an exchange into a record that is the same on every run and every machine, and compares records."""

import re
import zlib
from typing import Any

from tests.conformance.http_case import Case
from tests.conformance.http_exchange import Exchange, Response, exchange

Record = dict[str, Any]

RELEVANT = {
    "content-type",
    "content-length",
    "content-encoding",
    "inference-header-content-length",
    "accept-encoding",
    "transfer-encoding",
    "connection",
    "allow",
    "location",
    "retry-after",
}
# What changes from run to run: where the repository lies, object addresses, clocks and counters.
VARIABLE = (
    (re.compile(r"(?:/[^\s\"'/:]+)*(/[\w.-]+/\d+/model\.py)"), r"<repository>\1"),
    (re.compile(r"at 0x[0-9a-f]+"), "at 0x*"),
    (re.compile(r'"(ns|count|last_inference|inference_count|execution_count)":\d+'), r'"\1":0'),
    (re.compile(r'"batch_stats":\[[^\]]*\]'), '"batch_stats":[]'),
)
# The rules of tests.conformance.deliberate.
PARSER_WORDS = re.compile(r"(failed to parse the request JSON buffer: ).* at \d+")
CLIENTS_FAULT = re.compile(
    r'{"error":"(Unable to (parse|set) |attempt to |failed to (parse the request|get request params)|Expected JSON object)'
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
CODE_POINT = re.compile(r"\\u[0-9a-fA-F]{4}")


def steady(text: str) -> str:
    """``text`` without what changes from run to run."""
    for pattern, replacement in VARIABLE:
        text = pattern.sub(replacement, text)
    return text


def _varies(body: bytes) -> bool:
    text = body.decode("utf-8", "replace")
    return any(pattern.search(text) for pattern, _ in VARIABLE)


def _body(body: bytes) -> Record:
    try:
        return {"text": steady(body.decode())} if body else {}
    except UnicodeDecodeError:
        return {"hex": body.hex()}


def record_response(response: Response) -> Record:
    """One response as plain data: text stays text (key order shows), binary becomes hex."""
    headers = [(k, v) for k, v in response.headers if k.lower() in RELEVANT]
    record: Record = {"status": response.status, "reason": response.reason}
    if response.version != "HTTP/1.1":
        record["version"] = response.version
    try:
        plain = response.plain_body()
    except (OSError, EOFError, zlib.error):
        plain = response.body
        record["undecodable"] = True
    split = response.header("Inference-Header-Content-Length")
    document = plain
    if split is not None and split.isdigit():
        document = plain[: int(split)]
        record["binary"] = plain[int(split) :].hex()
    record.update(_body(document))
    if plain is not response.body or _varies(document):
        # the length then depends on the compressor, or on what `steady` replaced
        headers = [(k, "*" if k.lower() == "content-length" else v) for k, v in headers]
    record["headers"] = [list(pair) for pair in headers]
    return record


def record_exchange(case: Case, result: Exchange) -> Record:
    """All responses of a case and how the connection ended (where the case watches it)."""
    record: Record = {"responses": [record_response(response) for response in result.responses]}
    if "connection" in case.compare or result.connection != "open":
        record["connection"] = result.connection
    if result.junk:
        record["after"] = result.junk.decode("latin-1")
    return record


def ask(case: Case, address: tuple[str, int]) -> Record:
    """Run one case against one server; a refused connection or a broken answer is a record too."""
    try:
        result = exchange(
            address,
            case.parts(),
            expected=case.responses,
            half_close=case.half_close,
            method=case.method,
            watch_end="connection" in case.compare or case.method == "HEAD",
            read_timeout=case.patience,
        )
    except (OSError, ValueError) as error:
        return {"responses": [], "connection": f"failed: {type(error).__name__}: {error}"}
    return record_exchange(case, result)


def _comparable_body(answer: Record) -> list[str | None]:
    text = answer.get("text")
    if text is not None:
        text = _respelt(PARSER_WORDS.sub(r"\1*", text))
    return [text, answer.get("hex"), answer.get("binary")]


def _respelt(text: str) -> str:
    """JSON text with one spelling for equal numbers and escapes, and all else as it is."""
    text = CODE_POINT.sub(lambda match: match[0].lower(), text)
    return NUMBER.sub(_number, text)


def _number(match: re.Match[str]) -> str:
    text = match[0]
    return text if text.lstrip("-").isdigit() else repr(float(text))


def _comparable_headers(case: Case, answer: Record) -> list[tuple[str, str]]:
    """Headers in one order and case, without those that the rules leave free."""
    free = {("content-length", value) for _, value in answer["headers"]}  # left to the body
    if answer["status"] >= 400:
        free |= {("content-type", "application/json"), ("content-type", "text/plain")}
    if answer["status"] == 501:
        free.add(("accept-encoding", "gzip, deflate"))
    if b"HTTP/1.0\r\n" in case.parts()[0]:
        free.add(("connection", "close"))
    return sorted({(key.lower(), value) for key, value in answer["headers"]} - free)


def _aspect(case: Case, record: Record, name: str) -> Any:
    answers = record["responses"]
    if name == "connection":
        return record.get("connection", "open")
    if name == "headers":
        return [_comparable_headers(case, answer) for answer in answers]
    if name == "body":
        return [_comparable_body(answer) for answer in answers]
    return [answer["status"] for answer in answers]


def _as_told_here(ours: Record, theirs: Record) -> Record:
    """Their answers, with our status and the rest of our text where the rules let errors differ so."""
    pairs = zip(ours["responses"], theirs["responses"], strict=False)
    told = [_error_as_here(*pair) if pair[1]["status"] >= 400 else pair[1] for pair in pairs]
    return {**theirs, "responses": told + theirs["responses"][len(told) :]}


def _error_as_here(ours: Record, theirs: Record) -> Record:
    here, there = (PARSER_WORDS.sub(r"\1*", answer.get("text", "")) for answer in (ours, theirs))
    told = dict(theirs)
    if here.startswith(there.removesuffix('"}')):
        told["text"] = ours.get("text")
    if ours["status"] == 400 and CLIENTS_FAULT.match(there):
        told["status"] = 400
    return told


def differences(case: Case, ours: Record, theirs: Record) -> dict[str, tuple[Any, Any]]:
    """The compared aspects that differ beyond the rules, each with both values."""
    theirs = _as_told_here(ours, theirs)
    found: dict[str, tuple[Any, Any]] = {}
    names = list(case.compare)
    if "connection" not in names and not (ours["responses"] and theirs["responses"]):
        names.append("connection")  # without a response this is all there is to compare
    for name in names:
        left, right = _aspect(case, ours, name), _aspect(case, theirs, name)
        if left != right:
            found[name] = (left, right)
    return found
