"""Random configurations of models: as the text of a config.pbtxt, and as JSON that a client sends."""

import json
import random
from dataclasses import dataclass
from typing import Any

BASE = """backend: "python"
max_batch_size: {batch}
input [ {{ name: "IN" data_type: {type} dims: {dims} {more} }} ]
output [ {{ name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }} ]
"""
DIMS = (
    *("[ -1 ]", "[ - 1 ]", "[ 2 ]", "2", "[ 0x2 ]", "[ 010 ]", "[ 1, 2 ]"),
    *(
        "[ +2 ]",
        "[ 2_0 ]",
        "[ 0 ]",
        "[ -2 ]",
        "[ ]",
        "[ 2. ]",
        "[ 0o2 ]",
        "[ 99999999999999999999 ]",
    ),
)
DATATYPES = ("TYPE_INT32", "TYPE_INT32", "TYPE_INT32", "8", "TYPE_INT33", '"TYPE_INT32"')
MORE = (
    "",
    "",
    "",
    "optional: true",
    "optional: t",
    "optional: TRUE",
    "format: 9",
    "x: 1",
    "dims: 3",
)
INSTANCES = (
    *(
        "KIND_CPU",
        "KIND_CPU",
        "KIND_CPU",
        "KIND_CPU count: 2",
        "KIND_AUTO",
        "KIND_GPU",
        "KIND_MODEL",
    ),
    *(
        "KIND_CPU gpus: [ 0 ]",
        "KIND_GPU gpus: [ 0 ]",
        "KIND_AUTO gpus: [ 0 ]",
        "7",
        "KIND_CPU count: 0",
    ),
)
_CONTROL = 'control_input [ { name: "%s" control [ { kind: %s %s } ] } ]'
PARTS = (
    *("", "", "", "# caf\xe9", "# caf\xc3\xa9", "// no comment", "\xa0", "max_batch_size: 0"),
    *('runtime: "other.so"', 'platform: "x"', "version_policy { all { } }", "version_policy { }"),
    *("version_policy { specific { versions: 3 } }", 'default_model_filename: "no.py"'),
    *('parameters { key: "a" value { string_value: "\\?\\x41\\101" } }',),
    *('parameters { key: "a" value { string_value: "\\d" } }',),
    *("dynamic_batching { }", "dynamic_batching { default_queue_policy { timeout_action: 7 } }"),
    *("dynamic_batching { preferred_batch_size: 9 }", "response_cache { enable: true }"),
    "sequence_batching { }",
    *(
        "sequence_batching { " + _CONTROL % (name, kind, values) + " }"
        for name, kind, values in (
            ("S", "CONTROL_SEQUENCE_START", "int32_false_true: [ 0, 1 ]"),
            ("IN", "CONTROL_SEQUENCE_START", "int32_false_true: [ 0, 1 ]"),
            ("S", "CONTROL_SEQUENCE_START", "int32_false_true: [ 0 ]"),
            ("S", "CONTROL_SEQUENCE_CORRID", "data_type: TYPE_UINT64"),
            ("S", "CONTROL_SEQUENCE_CORRID", "data_type: TYPE_FP32"),
        )
    ),
    *("optimization { }", "model_transaction_policy { decoupled: false }", "nonsense: 1"),
    *(
        'metric_tags { key: "a" value: "b" }',
        'model_warmup [ { name: "w" } ]',
        "ensemble_scheduling { }",
    ),
)


@dataclass(frozen=True)
class Configured:
    """A configuration: ``file`` is the model's config.pbtxt, ``sent`` what a client sends instead, if any."""

    kind: str
    file: bytes
    sent: str | None = None


def random_configuration(seed: int) -> Configured:
    """Return the configuration of a seed."""
    rng = random.Random(seed)
    if rng.random() < 0.35:
        return _sent(rng)
    parts = {"batch": "0", "type": "TYPE_INT32", "dims": "[ -1 ]", "more": ""}
    instances, part = "KIND_CPU", ""
    # One of them is random, so that the first fault is the only one.
    which = rng.choice(("batch", "type", "dims", "more", "instances", "part", "part", "part"))
    value = {
        "batch": lambda: rng.choice(("0", "4", "-1", '"4"', "4.0", "true")),
        "type": lambda: rng.choice(DATATYPES),
        "dims": lambda: rng.choice(DIMS),
        "more": lambda: rng.choice(MORE),
        "instances": lambda: rng.choice(INSTANCES),
        "part": lambda: rng.choice(PARTS),
    }[which]()
    if which == "instances":
        instances = value
    elif which == "part":
        part = value
        parts["batch"] = rng.choice(("0", "4"))
    else:
        parts[which] = value
    text = BASE.format(**parts) + f"instance_group [ {{ kind: {instances} }} ]\n{part}\n"
    return Configured(f"file: {which} {value}", text.encode("latin-1"))


def _sent(rng: random.Random) -> Configured:
    tensor: dict[str, Any] = {"name": "IN", "data_type": "TYPE_INT32", "dims": [-1]}
    output = {"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]}
    document: dict[str, Any] = {
        "backend": "python",
        "max_batch_size": 0,
        "input": [tensor],
        "output": [output],
        "instance_group": [{"kind": "KIND_CPU"}],
    }
    odd: tuple[Any, ...]
    member, owner, odd = rng.choice(
        (
            ("dims", tensor, (2, "2", [2.0], [[2]], [None], None, 2.5, "2.0", True, [], {})),
            ("data_type", tensor, ("type_int32", "TYPE-INT32", 8, "8", "NOPE", True, None, 8.0)),
            ("optional", tensor, ("true", "yes", "1", "x", 1, None, [])),
            ("input", document, (tensor, None, [], [None], [[tensor]], "x", 3)),
            ("max_batch_size", document, ("0", 0.0, "x", True, None, [0], -1, 1 << 40)),
            ("backend", document, (3, None, [], "nope", "")),
            ("parameters", document, ({"a": None}, {"a": "v"}, [], {"a": {"string_value": 3}})),
            (
                "instance_group",
                document,
                ({"kind": "KIND_CPU"}, {"kind": "KIND_GPU"}, [{"kind": 7}]),
            ),
            ("version_policy", document, (None, {}, {"all": {}}, 3, "x", [{"all": {}}])),
            ("nonsense", document, (1, None)),
        )
    )
    value = owner[member] = rng.choice(odd)
    sent = json.dumps(document)
    kind = f"sent: {member} {json.dumps(value)}"
    if rng.random() < 0.15:
        sent = rng.choice(
            ("", "null", "[]", "{", "3", sent[:-1], sent + "x", sent.replace('"', "'"))
        )
        kind = "sent: malformed"
    plain = BASE.format(batch=0, type="TYPE_INT32", dims="[ -1 ]", more="")
    return Configured(kind, plain.encode(), sent)
