"""Random requests: every data type, endpoint and stream, mostly with one fault."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from tests.conformance.http_case import strings

Json = dict[str, Any]
Fault = Callable[[random.Random, Json], None]

TYPES = (
    *("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
    *("FP16", "FP32", "FP64", "BF16", "STRING"),
)
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
ODD = (None, [], {}, "", "x", 0, -1, 1.5, True, 1 << 63, ["x"], {"x": 1})


@dataclass(frozen=True)
class Asked:
    """A request of one seed: by HTTP (method, path, body, headers), or by gRPC (method, messages)."""

    kind: str
    fault: str
    http: tuple[str, str, bytes, dict[str, str]] | None = None
    grpc: tuple[str, list[Any]] | None = field(default=None, compare=False)


def random_request(seed: int) -> Asked:
    """Return the request of a seed."""
    rng = random.Random(seed)
    return rng.choices(
        (_http_infer, _grpc_infer, _stream, _generate, _raw, _control, _grpc_control),
        (6, 4, 2, 3, 1, 2, 1),
    )[0](rng)


def _tensor(rng: random.Random, batched: bool) -> tuple[Json, bytes]:
    """Return an input for an identity model as JSON, and its bytes."""
    kind = rng.choice(TYPES)
    shape = ([rng.randint(1, 3)] if batched else []) + [rng.randint(0, 4)]
    count = int(np.prod(shape))
    if kind == "STRING":
        texts = ["".join(rng.choices('ab é\n"0', k=rng.randint(0, 3))) for _ in range(count)]
        data: list[Any] = list(texts)
        raw = strings(*(text.encode() for text in texts))
    elif kind in ("FP16", "BF16"):
        data, raw = [], rng.randbytes(2 * count)
    elif kind == "BOOL":
        data = [rng.random() < 0.5 for _ in range(count)]
        raw = np.array(data, bool).tobytes()
    else:
        dtype = np.dtype(kind.lower().replace("fp", "float"))
        array = np.frombuffer(rng.randbytes(dtype.itemsize * count), dtype)
        if kind.startswith("FP"):
            array = np.array([rng.choice((0.0, -1.5, 0.1, 1e10)) for _ in range(count)], dtype)
        data, raw = array.tolist(), array.tobytes()
    name = "BYTES" if kind == "STRING" else kind
    return {"name": f"IN_{kind}", "shape": shape, "datatype": name, "data": data}, raw


def _document(rng: random.Random) -> tuple[str, Json, bytes]:
    """Return a model, a valid document for it, and what follows it."""
    batched = rng.random() < 0.4
    tensors = [_tensor(rng, batched) for _ in range(rng.randint(1, 3))]
    unique = {tensor["name"]: (tensor, raw) for tensor, raw in tensors}
    inputs, tail = [], b""
    rows = next(iter(unique.values()))[0]["shape"][0]
    for tensor, raw in unique.values():
        if batched and tensor["shape"][0] != rows:
            continue
        if tensor["datatype"] in ("FP16", "BF16") or rng.random() < 0.4:
            del tensor["data"]
            tensor["parameters"] = {"binary_data_size": len(raw)}
            tail += raw
        inputs.append(tensor)
    document: Json = {"inputs": inputs}
    if rng.random() < 0.3:
        document["id"] = rng.choice(("", "a", "é", "0" * 300))
    if rng.random() < 0.5:
        outputs = [{"name": tensor["name"].replace("IN_", "OUT_")} for tensor in inputs]
        for output in outputs:
            if rng.random() < 0.6:
                output["parameters"] = {"binary_data": rng.random() < 0.7}
        document["outputs"] = outputs
    else:
        document["parameters"] = {"binary_data_output": True}
    if rng.random() < 0.2:
        document.setdefault("parameters", {})["k"] = rng.choice((1, "x", True, -5))
    return "identity_batched" if batched else "identity", document, tail


def _one_input(rng: random.Random, document: Json) -> Json:
    return rng.choice(document["inputs"]) if document["inputs"] else {}


def _set(place: str) -> Fault:
    """Return a fault that gives a member an odd value: ``input.x``, ``output.x``, ``x``, with parameters by ``/``."""

    def fault(rng: random.Random, document: Json) -> None:
        owner: Any = document
        *path, last = place.split(".")
        for part in path:
            if part == "input":
                owner = _one_input(rng, document)
            elif part == "output":
                document.setdefault("outputs", [{"name": "OUT_INT32"}])
                owner = rng.choice(document["outputs"] or [{}])
            else:
                owner = owner.setdefault(part, {})
        owner[last] = rng.choice(ODD)

    return fault


def _drop(member: str) -> Fault:
    def fault(rng: random.Random, document: Json) -> None:
        _one_input(rng, document).pop(member, None)

    return fault


def _more_data(rng: random.Random, document: Json) -> None:
    data = _one_input(rng, document).get("data")
    if data:
        data.append(data[0])


def _less_data(rng: random.Random, document: Json) -> None:
    data = _one_input(rng, document).get("data")
    if data:
        data.pop()


def _nested_data(rng: random.Random, document: Json) -> None:
    tensor = _one_input(rng, document)
    if "data" in tensor:
        tensor["data"] = [[value] for value in tensor["data"]]


def _twice(rng: random.Random, document: Json) -> None:
    document["inputs"] += document["inputs"][:1]


def _no_inputs(_: random.Random, document: Json) -> None:
    document["inputs"] = []


def _other_shape(rng: random.Random, document: Json) -> None:
    _one_input(rng, document)["shape"] = rng.choice(([], [0], [1, 1, 1], [2], [-1]))


_PLACES = (
    *("id", "inputs", "outputs", "parameters", "parameters.k", "parameters.priority"),
    *("parameters.timeout", "parameters.sequence_id", "parameters.sequence_start"),
    *("parameters.binary_data_output", "parameters.triton_x"),
    *(f"input.{name}" for name in ("name", "shape", "datatype", "data", "parameters")),
    *("input.parameters.binary_data_size", "input.parameters.x"),
    *(f"output.{name}" for name in ("name", "parameters", "parameters.binary_data")),
    *("output.parameters.classification", "output.parameters.x"),
)
FAULTS: dict[str, Fault] = {
    **{f"odd {place}": _set(place) for place in _PLACES},
    **{
        f"no {member} of an input": _drop(member)
        for member in ("name", "shape", "datatype", "data")
    },
    "surplus values": _more_data,
    "missing values": _less_data,
    "nested values": _nested_data,
    "an input twice": _twice,
    "no inputs": _no_inputs,
    "another shape": _other_shape,
}


def _faulty(rng: random.Random, document: Json) -> str:
    if rng.random() < 0.35:
        return ""
    name = rng.choice(list(FAULTS))
    FAULTS[name](rng, document)
    return name


def _http_infer(rng: random.Random) -> Asked:
    model, document, tail = _document(rng)
    fault = _faulty(rng, document)
    header = json.dumps(document).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))} if tail else {}
    if not fault and rng.random() < 0.1:
        fault, tail = rng.choice(
            (("a tail too long", tail + b"x"), ("a tail too short", tail[:-1]))
        )
        headers = {"Inference-Header-Content-Length": str(len(header))}
    version = rng.choices(("", "/versions/1", "/versions/2", "/versions/0"), (9, 3, 1, 1))[0]
    path = f"/v2/models/{model}{version}/infer"
    return Asked("infer", fault, ("POST", path, header + tail, headers))


def _raw(rng: random.Random) -> Asked:
    models = (
        "raw_bytes",
        "raw_batched",
        "raw_pairs",
        "raw_square",
        "raw_text",
        "raw_texts",
        "reshape",
    )
    headers = {"Inference-Header-Content-Length": "0"}
    body = rng.randbytes(rng.choice((0, 1, 4, 7, 8, 16)))
    return Asked("raw", "", ("POST", f"/v2/models/{rng.choice(models)}/infer", body, headers))


def _generate(rng: random.Random) -> Asked:
    stream = rng.choice(("generate", "generate_stream"))
    model, good = rng.choice((("raw_text", "a"), ("raw_texts", ["a", "b"]), ("raw_bytes", [1, 2])))
    document: Json = {"IN": good}
    member = rng.choice(("IN", "id", "k", "parameters"))
    value = rng.choice((*ODD, good, [good], [[good]], [good, good]))
    document[member] = value
    path = f"/v2/models/{model}/{stream}"
    body = json.dumps(document).encode()
    return Asked("generate", f"{member} is {json.dumps(value)}", ("POST", path, body, {}))


def _control(rng: random.Random) -> Asked:
    model = rng.choice(("identity", "add_sub", "versions_all", "nope", "versions_latest"))
    version = rng.choice(("", "/versions/1", "/versions/3", "/versions/9"))
    path = rng.choice(("", "/config", "/ready")) if rng.random() < 0.6 else None
    if path is not None:
        return Asked("model" + path, "", ("GET", f"/v2/models/{model}{version}{path}", b"", {}))
    place, kind = rng.choice(
        (
            ("/v2/health/live", "health"),
            ("/v2/health/ready", "health"),
            ("/v2/repository/index", "index"),
            ("/v2/logging", "logging"),
            ("/v2/trace/setting", "trace"),
            ("/v2/repository/models/nope/unload", "unload"),
            ("/v2/repository/models/nope/load", "load"),
            ("/v2/systemsharedmemory/status", "memory"),
            ("/v2/systemsharedmemory/region/x/register", "memory"),
        )
    )
    if kind == "health" or place.endswith("status"):
        return Asked(kind, "", ("GET", place, b"", {}))
    member = {"index": "ready", "logging": "log_info", "trace": "trace_rate", "memory": "key"}
    body: Any = {member.get(kind, "parameters"): rng.choice(ODD)}
    if kind == "unload" and rng.random() < 0.5:
        body = {"parameters": {"unload_dependents": rng.choice(ODD)}}
    return Asked(kind, f"odd {json.dumps(body)}", ("POST", place, json.dumps(body).encode(), {}))


def _message(rng: random.Random) -> tuple[str, Any]:
    """Return a fault and a ModelInferRequest."""
    batched = rng.random() < 0.4
    tensor, raw = _tensor(rng, batched)
    model = "identity_batched" if batched else "identity"
    message = pb.ModelInferRequest(model_name=model, id=rng.choice(("", "a")))
    entry = message.inputs.add(
        name=tensor["name"], shape=tensor["shape"], datatype=tensor["datatype"]
    )
    values = [v.encode() if isinstance(v, str) else v for v in tensor["data"]]
    if tensor["datatype"] in _CONTENTS and values and rng.random() < 0.5:
        getattr(entry.contents, _CONTENTS[tensor["datatype"]]).extend(values)
    else:
        message.raw_input_contents.append(raw)
    fault = rng.choice(("", "", "", *_MESSAGE_FAULTS))
    if fault:
        _MESSAGE_FAULTS[fault](rng, message)
    return fault, message


def _typed_and_raw(_: random.Random, message: Any) -> None:
    message.inputs[0].contents.int_contents.append(1)


_MESSAGE_FAULTS: dict[str, Callable[[random.Random, Any], Any]] = {
    "another version": lambda rng, m: setattr(
        m, "model_version", rng.choice(("1", "2", "x", "-1"))
    ),
    "another model": lambda rng, m: setattr(m, "model_name", "nope"),
    "another shape": lambda rng, m: m.inputs[0].shape.append(rng.choice((0, 1, -1))),
    "another datatype": lambda rng, m: setattr(
        m.inputs[0], "datatype", rng.choice(("INT32", "X", ""))
    ),
    "another name": lambda rng, m: setattr(m.inputs[0], "name", "nope"),
    "typed and raw": _typed_and_raw,
    "less raw": lambda rng, m: m.raw_input_contents and m.raw_input_contents.pop(),
    "an unknown output": lambda rng, m: m.outputs.add(name="nope"),
    "a reserved parameter": lambda rng, m: m.parameters["triton_x"].ParseFromString(b"\x08\x01"),
    "a sequence flag of text": lambda rng, m: m.parameters["sequence_start"].ParseFromString(
        b"\x1a\x01x"
    ),
}


def _grpc_infer(rng: random.Random) -> Asked:
    fault, message = _message(rng)
    return Asked("grpc infer", fault, grpc=("ModelInfer", [message]))


def _stream(rng: random.Random) -> Asked:
    if rng.random() < 0.5:
        count = np.array([rng.choice((0, 1, 3))], np.int32).tobytes()
        message = pb.ModelInferRequest(model_name="decoupled", raw_input_contents=[count])
        message.inputs.add(name="COUNT", shape=[1], datatype="INT32")
        if rng.random() < 0.5:
            message.parameters["triton_enable_empty_final_response"].bool_param = True
        return Asked("stream of a decoupled model", "", grpc=("ModelStreamInfer", [message]))
    fault, message = _message(rng)
    return Asked("stream", fault, grpc=("ModelStreamInfer", [message]))


def _grpc_control(rng: random.Random) -> Asked:
    name, version = (
        rng.choice(("identity", "nope", "versions_all")),
        rng.choice(("", "1", "9", "x", "-1")),
    )
    kind = rng.choice(("ModelReady", "ModelMetadata", "ModelConfig"))
    message = getattr(pb, f"{kind}Request")(name=name, version=version)
    return Asked(f"grpc {kind}", f"version {version}", grpc=(kind, [message]))
