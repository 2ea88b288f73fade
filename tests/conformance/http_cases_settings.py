"""The logging and trace extensions: what settings look like, and what is refused.

Every change is undone by a later case, so that the cases can be asked in any number of rounds.
"""

import json

from tests.conformance.http_case import Case, get, post

LOGGING_PATH = "/v2/logging"
TRACE_PATH = "/v2/trace/setting"
MODEL_PATH = "/v2/models/add_sub/trace/setting"


def change(name: str, path: str, document: object) -> Case:
    """A POST of a JSON document."""
    return post(name, path, json.dumps(document).encode())


LOGGING = [
    get("logging settings", LOGGING_PATH),
    get("logging with query", f"{LOGGING_PATH}?x=1"),
    Case("logging by PUT", "PUT", LOGGING_PATH),
    post("logging unknown setting", LOGGING_PATH, b'{"nope":1}'),
    post("logging no object", LOGGING_PATH, b"[1]"),
    post("logging null", LOGGING_PATH, b"null"),
    change("logging verbose", LOGGING_PATH, {"log_verbose_level": 2}),
    change("logging verbose beyond 32 bits", LOGGING_PATH, {"log_verbose_level": 5000000000}),
    change("logging verbose text", LOGGING_PATH, {"log_verbose_level": "1"}),
    change("logging verbose negative", LOGGING_PATH, {"log_verbose_level": -1}),
    change("logging verbose fraction", LOGGING_PATH, {"log_verbose_level": 1.5}),
    change("logging verbose null", LOGGING_PATH, {"log_verbose_level": None}),
    change("logging verbose off", LOGGING_PATH, {"log_verbose_level": 0}),
    change("logging info text", LOGGING_PATH, {"log_info": "yes"}),
    change("logging info off", LOGGING_PATH, {"log_info": False}),
    change("logging info on", LOGGING_PATH, {"log_info": True, "log_warning": None}),
    change("logging format", LOGGING_PATH, {"log_format": "ISO8601"}),
    change("logging format unknown", LOGGING_PATH, {"log_format": "iso"}),
    change("logging format number", LOGGING_PATH, {"log_format": 3}),
    change("logging format back", LOGGING_PATH, {"log_format": "default"}),
    change("logging file", LOGGING_PATH, {"log_file": "x.log"}),
]

TRACES = [
    get("trace settings", TRACE_PATH),
    Case("trace settings by PUT", "PUT", TRACE_PATH),
    post("trace no object", TRACE_PATH, b"3"),
    change("trace unknown setting", TRACE_PATH, {"nope": 1}),
    change("trace level without a file", TRACE_PATH, {"trace_level": ["TIMESTAMPS"]}),
    change("trace level off", TRACE_PATH, {"trace_level": ["OFF"]}),
    change("trace level off and another", TRACE_PATH, {"trace_level": ["OFF", "TENSORS"]}),
    change("trace level text", TRACE_PATH, {"trace_level": "OFF"}),
    change("trace level number", TRACE_PATH, {"trace_level": [3]}),
    change("trace level cleared", TRACE_PATH, {"trace_level": None}),
    change("trace rate", TRACE_PATH, {"trace_rate": "5"}),
    change("trace rate number", TRACE_PATH, {"trace_rate": 5}),
    change("trace rate no number", TRACE_PATH, {"trace_rate": "x"}),
    change("trace rate beyond 32 bits", TRACE_PATH, {"trace_rate": "99999999999999999999"}),
    change("trace rate empty", TRACE_PATH, {"trace_rate": ""}),
    change("trace rate cleared", TRACE_PATH, {"trace_rate": None}),
    change("trace count", TRACE_PATH, {"trace_count": "7"}),
    change("trace count no number", TRACE_PATH, {"trace_count": "x"}),
    change("trace count cleared", TRACE_PATH, {"trace_count": None}),
    change("trace log frequency", TRACE_PATH, {"log_frequency": "3"}),
    change("trace log frequency no number", TRACE_PATH, {"log_frequency": "y"}),
    change("trace log frequency cleared", TRACE_PATH, {"log_frequency": None}),
    change("trace file", TRACE_PATH, {"trace_file": "other.json"}),
    change("trace mode", TRACE_PATH, {"trace_mode": "triton"}),
    get("trace of an unknown model", "/v2/models/nope/trace/setting"),
    get("trace of a version", "/v2/models/add_sub/versions/1/trace/setting"),
    get("trace of a model", MODEL_PATH),
    change("trace of a model changed", MODEL_PATH, {"trace_rate": "3", "trace_count": "10"}),
    change("trace of the server changed", TRACE_PATH, {"trace_rate": "77"}),
    get("trace of a model stays", MODEL_PATH),
    change("trace of a model cleared", MODEL_PATH, {"trace_rate": None}),
    change("trace of a model all cleared", MODEL_PATH, {"trace_count": None}),
    change("trace of the server cleared", TRACE_PATH, {"trace_rate": None}),
]

CASES: list[Case] = [*LOGGING, *TRACES]
