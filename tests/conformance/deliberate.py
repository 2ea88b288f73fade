"""Deliberate differences from the answers of Triton 2.51, each with its reason.

python -m tests.conformance.deliberate > docs/reference/differences.md
"""

import sys
from dataclasses import dataclass

from tests.conformance.api_differences import DIFFERENCES
from tests.conformance.by_hand import BY_HAND


@dataclass(frozen=True)
class Difference:
    """One difference that clients and models may see.

    Parameters
    ----------
    what
        The situation.
    triton, here
        What each of the two does in it.
    why
        The reason.
    chance
        Whether the two may also happen to agree.
    """

    what: str
    triton: str
    here: str
    why: str = ""
    chance: bool = False


def _difference(text: str, chance: bool = False) -> Difference:
    """Read a difference: what, Triton, here and why, between bars; wrapped at spaces."""
    what, triton, here, why = " ".join(text.split()).split(" | ")
    return Difference(what, triton, here, why, chance)


# -- rules of the comparison: they hold for every case ------------------------------------------------

ERROR_TYPE = _difference("""
    `Content-Type` of an error | `application/json` or, for the same kind of body, `text/plain` |
    `application/json` | the body is JSON
""")
PARSER_WORDS = _difference("""
    text of a JSON syntax error | rapidjson's words and byte offset after `failed to parse the
    request JSON buffer: ` | other words after the same beginning | they are the parser's own
""")
CLIENTS_FAULT = _difference("""
    status of an error in what a client sent: JSON that is malformed, or has a value of a wrong type |
    500 | 400 | the client has to correct it
""")
MORE_WORDS = _difference("""
    text of an error | names neither the tensor nor what there is | the same, and then what was
    expected, what came, where, or which inputs and outputs there are | it says what to correct
""")
SPELLING = Difference(
    "spelling of escapes, and the last of 17 digits, in JSON answers",
    "`\\u000B`, `0.30000001192092898`",
    "`\\u000b`, `0.30000001192092896`",
    "the same values to every JSON parser",
)
CLOSE_IN_HTTP_1_0 = _difference("""
    answer to HTTP/1.0 | no `Connection` header | `Connection: close` | it says what both do
""")
CODINGS_TOLD = _difference("""
    answer to an unknown `Content-Encoding` | `Accept-Encoding: gzip, deflate` in the 501 | no such
    header | nothing reads it
""")
RULES = (
    ERROR_TYPE,
    PARSER_WORDS,
    CLIENTS_FAULT,
    MORE_WORDS,
    SPELLING,
    CLOSE_IN_HTTP_1_0,
    CODINGS_TOLD,
)

# -- reasons of single cases ---------------------------------------------------------------------------

SERVER_NAME = _difference("""
    `GET /v2` | its version and extensions | our own; `gpubridge(VERSION)` is among the extensions |
    the name is `triton`, as clients expect it; clients can distinguish the servers
""")
OWN_PAGES = _difference("""
    `GET /` on the HTTP port | 404 | a page of links: the status page, metrics, a page that calls models
    | who opens the address in a browser finds them
""")
ENCODED_NAME = _difference("""
    a model's name that is percent-encoded in a path, as tritonclient does: `a%2Cb` | no such model
    | the model `a,b` | RFC 3986: both are written for the same
""")
CLOSE_IN_CAPITALS = Difference(
    "`Connection: CLOSE`", "stays open", "closes", "RFC 9110: the case does not matter"
)
BEYOND_RANGE = _difference("""
    a number beyond its datatype in JSON or typed contents: 300 as UINT8, 1e300 as FP32 | another
    number: 44, infinity | 400 that names the tensor and the element | it is not what the client
    sent
""")
CODING_IN_CAPITALS = Difference(
    "`Content-Encoding: GZIP`", "501", "is gzip", "RFC 9110: the case does not matter"
)
CHUNK_EXTENSION = Difference(
    "chunk extensions", "closes without an answer", "ignores them", "RFC 9112"
)
EXPECTATION = Difference(
    "`Expect` of anything but `100-continue`", "100", "ignores it", "RFC 9110 knows no other"
)
FRAMING = _difference("""
    a length that is no number, negative, given twice, or beside chunks; chunks that are none |
    accepts it, waits, or closes without an answer | 400, then closes | where two servers read a
    body differently, requests can be smuggled
""")
MALFORMED = _difference("""
    bytes that are no HTTP/1 head: bare line feeds, folded lines, no colon, HTTP/2, TLS | takes
    them, or closes without an answer | 400 with the reason, then closes | the reason helps to debug
    a client
""")
OLD_OR_NEW_HTTP = _difference("""
    a request line of HTTP/0.9 or HTTP/2.0 | hangs; takes it as HTTP/1.1 | answers, then closes |
    nothing after it can be framed
""")
EMPTY_LINE = Difference(
    "an empty line before a request", "hangs", "ignores it", "RFC 9112 asks for that"
)
LIMITS = _difference("""
    a body beyond the limit, a head beyond 64 KiB, a very long path | waits, or resets the
    connection | 413, 431, 404 | the client learns the reason
""")
BYTE_BY_BYTE = Difference("a head that comes byte by byte", "404", "is read", "a defect of Triton")
PIPELINED_GETS = Difference(
    "pipelined GETs", "answers the first only", "answers all", "a defect of Triton"
)
SHORT_ANSWERS = _difference("""
    an answer of less than 1 KiB to a client that accepts several codings | is compressed | is not | it
    is one packet either way, and costs several times as much
""")
BAD_COMPRESSION = _difference("""
    a body that is not in its `Content-Encoding`, or cut short | takes it as empty, or uses what can
    be unpacked | 400 with the reason | half a tensor is no tensor
""")
DUPLICATE_KEY = Difference(
    "a key twice in one JSON object", "the first counts", "the last counts", "the parser's rule"
)
NESTING = _difference("""
    JSON nested thousands deep | is read | 400, not parsed | a limit protects the server's stack
""")
INF_LITERAL = _difference("""
    the bare words `Inf`, `-Inf` in JSON | are numbers | 400, not parsed (`Infinity`, `NaN` are
    taken) | no JSON library writes them
""")
NOT_UTF8 = _difference("""
    JSON that is not UTF-8 | is taken as it is | 400, not parsed | RFC 8259; bytes of any kind go as
    binary data
""")
HUGE_SHAPE = _difference("""
    a shape of more elements than 63 bits count | errors that do not name it (500, 400) | 400 that
    does | the count overflows at Triton
""")
BATCH_OF_NONE = _difference("""
    batch size 0 | 400 `input byte size mismatch` | 400 that names the batch size | says what is
    wrong
""")
BIG_PARAMETER = _difference("""
    an integer parameter of 2^63 and more | reaches the model as a double | reaches the model as it
    is, up to 2^64 - 1 | no digits are lost
""")
HASH_ORDER = _difference(
    """
    order of a request's inputs, and which of several faults is reported | that of a hash table:
    chance | the request's order | repeatable
""",
    chance=True,
)
NO_ANSWER = _difference("""
    `execute` returns None, or None for a response, and no response sender answers | the client
    waits for ever | 500 with the reason | a hang is no answer
""")
GENERATOR = _difference("""
    `execute` returns a generator | runs it as a coroutine, and fails | 500: expected a list | a
    generator is not a list
""")
CONSTRUCTOR_TEXT = _difference("""
    text of a TypeError for wrong arguments of `pb_utils` | that of its binding library | names the
    argument, what was expected and what came | the class is the same
""")

# -- models that do not load, or die (load_outcomes.py) --------------------------------------------------

REASON = _difference("""
    reason of a model that did not load | the error code's name before it, `<frozen importlib…>` and
    its own files among the places | neither | the same content, shorter
""")
DEATH = _difference("""
    the process of a model dies | 500 `Stub process 'NAME' is not healthy.`, again for every later
    request | 503, the same text and how it died; a new process takes over | the cause helps to
    correct it; clients may try again
""")
LOADING_HANGS = _difference("""
    no model file, a process that dies at import, a model called `bad;name` | loading never ends |
    the reason is reported; any name is accepted | a hang is no answer
""")
CONFIG_REASON = _difference("""
    a `config.pbtxt` that cannot be read, a model without a version | the reason is in the log only
    | it is in the repository index, too | users look there first
""")
CONFIG_TEXT = _difference("""
    an unknown backend, GPU or environment path | says what came | says what was expected, too | the
    error says how to correct it
""")
CONFIG_STRICT = _difference("""
    a negative number of instances, a version called `0` | are taken | refused; a version `0` is
    ignored | most likely a mistake
""")
NO_EXECUTE = _difference("""
    a model class without `execute` | loads, and fails every request | does not load, with the same
    text | no request can ever succeed
""")
NO_COMPLETION = _difference("""
    `auto_complete_config` returns what is no configuration: an unknown data type, an unknown field
    | loads the model as if it had returned nothing | refused, says what is wrong | a mistake that
    would show only with the first request
""")
ONE_VERSION_BROKEN = _difference("""
    one version of several does not load | none serves | the others serve | one version's fault is
    not another's
""")

GENERATE_LENGTH = _difference("""
    head of an answer of `/generate` | `Transfer-Encoding: chunked` | `Content-Length` | the answer
    is whole when it is sent
""")
GENERATE_COUNT = _difference("""
    `/generate` of a model that sends no or several responses | status 200 with an error in the body
    | status 400 with the same error | clients look at the status
""")


def _documented() -> list[Difference]:
    """The differences, in the order written here."""
    return [value for value in globals().values() if isinstance(value, Difference)]


_TOP = """\
# Differences from Triton 2.51

How gpubridge answers is compared, in every test run, with recorded answers of the real server
(`tests/conformance`: several hundred requests over HTTP, and several dozen models that do not load).
This is all that differs in them. The file is written by `python -m tests.conformance.deliberate`;
a test keeps it so.

## On purpose

| situation | Triton | gpubridge | why |
|---|---|---|---|
"""
_API = """
## What models observe

Code that models run (`tests/conformance/api_repository`), compared in the same way; the reference is
a newer Triton than 2.51.

| situation | Triton 2.51 | gpubridge | why |
|---|---|---|---|
"""
_OTHERS = """
## Seen by hand

Requests and models that were put to both by hand; no test keeps these rows true.

| situation | Triton 2.51 | gpubridge | why |
|---|---|---|---|
"""


def document() -> str:
    """The text of docs/reference/differences.md."""
    rows = [f"| {d.what} | {d.triton} | {d.here} | {d.why} |" for d in _documented()]
    api = [f"| {d.what} | {d.triton} | {d.here} | {d.why} |" for d in DIFFERENCES]
    others = [f"| {' | '.join(row)} |" for row in BY_HAND]
    parts = [(_TOP, rows), (_API, api), (_OTHERS, others)]
    return "".join(head + "\n".join(lines) + "\n" for head, lines in parts)


if __name__ == "__main__":
    sys.stdout.write(document())
