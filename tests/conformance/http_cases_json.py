"""Infer with JSON data: documents, tensors of every datatype, shapes, outputs and parameters."""

from typing import Any

from tests.conformance import deliberate as why
from tests.conformance.deliberate import Difference
from tests.conformance.http_case import ADD_SUB, INPUT0, INPUT1, Case, infer, sent, tensor


def document(name: str, body: object, **fields: Any) -> Case:
    return infer(f"document: {name}", "add_sub", body, **fields)


def first(name: str, replacement: object, **fields: Any) -> Case:
    """add_sub with its first input replaced."""
    return infer(f"input: {name}", "add_sub", {"inputs": [replacement, INPUT1]}, **fields)


def value(name: str, datatype: str, *data: object, differs: Difference | None = None) -> Case:
    """identity with one JSON tensor of that datatype."""
    given = tensor("IN_" + datatype.replace("BYTES", "STRING"), datatype, [len(data)], list(data))
    return sent(f"{datatype}: {name}", "identity", given, differs=differs)


def literal(name: str, datatype: str, shape: str, data: str, **fields: Any) -> Case:
    """The same with shape and data as JSON text, for what Python cannot write."""
    text = f'{{"name":"IN_{datatype}","shape":{shape},"datatype":"{datatype}","data":{data}}}'
    return infer(f"{datatype}: {name}", "identity", f'{{"inputs":[{text}]}}', **fields)


def batch(name: str, shape: list[int], count: int, **fields: Any) -> Case:
    given = tensor("INPUT0", "INT32", shape, list(range(count)))
    return infer(f"batch: {name}", "optional_input", {"inputs": [given]}, **fields)


def outputs(name: str, asked: object, **fields: Any) -> Case:
    document = {"inputs": [INPUT0, INPUT1], "outputs": asked}
    return infer(f"outputs: {name}", "add_sub", document, **fields)


def parameters(
    name: str, given: object, *, differs: Difference | None = None, **keys: object
) -> Case:
    view = {"inputs": [tensor("INPUT", "INT32", [1], [1])], "outputs": [{"name": "VIEW"}]}
    return infer(
        f"parameters: {name}",
        "request_view",
        {**view, "parameters": given, **keys},
        differs=differs,
    )


WITHOUT = {
    key: {k: v for k, v in INPUT0.items() if k != key}
    for key in ("name", "shape", "datatype", "data")
}
DEEP = b"[" * 10_000 + b"]" * 10_000

DOCUMENTS = [
    document("plain", ADD_SUB),
    document("with id", {"id": "seven", "inputs": [INPUT0, INPUT1]}),
    document("empty id", {"id": "", "inputs": [INPUT0, INPUT1]}),
    document("id with escapes", {"id": 'ä"\\\n\t☃', "inputs": [INPUT0, INPUT1]}),
    document("id is a number", {"id": 5, "inputs": [INPUT0, INPUT1]}),
    document("id is null", {"id": None, "inputs": [INPUT0, INPUT1]}),
    document("unknown key", {"inputs": [INPUT0, INPUT1], "unknown": 1}),
    document("inputs last", {"outputs": [], "inputs": [INPUT1, INPUT0]}),
    document("duplicate id", b'{"id":"a","id":"b",' + ADD_SUB[1:], differs=why.DUPLICATE_KEY),
    document("empty body", b""),
    document("not JSON", b"hello"),
    document("empty object", {}),
    document("array", []),
    document("number", 5),
    document("null", None),
    document("string", '"x"'),
    document("truncated", ADD_SUB[:-10]),
    document("trailing garbage", ADD_SUB + b" x"),
    document("trailing white space", ADD_SUB + b" \r\n\t"),
    document("trailing comma", ADD_SUB[:-1] + b",}"),
    document("byte order mark", b"\xef\xbb\xbf" + ADD_SUB),
    document("UTF-16", ADD_SUB.decode().encode("utf-16-le")),
    document("comment", b"/* c */" + ADD_SUB),
    document("single quotes", ADD_SUB.replace(b'"', b"'")),
    document("raw newline in a string", b'{"id":"a\nb",' + ADD_SUB[1:]),
    document("bad escape", b'{"id":"\\x",' + ADD_SUB[1:]),
    document("deep arrays", DEEP, differs=why.NESTING),
    document("deep id", b'{"id":' + DEEP + b"," + ADD_SUB[1:], differs=why.NESTING),
    document("inputs missing", {"outputs": []}),
    document("inputs is an object", {"inputs": {}}),
    document("inputs is null", {"inputs": None}),
    document("inputs is empty", {"inputs": []}),
    document("inputs of numbers", {"inputs": [1, 2]}),
    document("outputs is an object", {"inputs": [INPUT0, INPUT1], "outputs": {}}),
    document("outputs is null", {"inputs": [INPUT0, INPUT1], "outputs": None}),
]

INPUTS = [
    document("one input missing", {"inputs": [INPUT0]}),
    document("one input missing, with id", {"id": "r1", "inputs": [INPUT0]}),
    document(
        "one input too many",
        {"inputs": [INPUT0, INPUT1, {**INPUT0, "name": "X"}]},
        differs=why.HASH_ORDER,
    ),
    document("unknown input in place of one", {"inputs": [INPUT0, {**INPUT1, "name": "X"}]}),
    document("input twice", {"inputs": [INPUT0, INPUT0]}),
    first("no name", WITHOUT["name"]),
    first("no shape", WITHOUT["shape"]),
    first("no datatype", WITHOUT["datatype"]),
    first("no data", WITHOUT["data"]),
    first("name is a number", {**INPUT0, "name": 1}),
    first("empty name", {**INPUT0, "name": ""}),
    first("datatype is a number", {**INPUT0, "datatype": 1}),
    first("datatype unknown", {**INPUT0, "datatype": "JUNK"}),
    first("datatype in lower case", {**INPUT0, "datatype": "fp32"}),
    first("datatype with TYPE_", {**INPUT0, "datatype": "TYPE_FP32"}),
    first("datatype of another size", {**INPUT0, "datatype": "FP64"}),
    first("datatype of the same size", {**INPUT0, "datatype": "INT32"}),
    first("rank", {**INPUT0, "shape": [2, 2]}),
    first("batch dimension that is not there", {**INPUT0, "shape": [1, 4]}),
    first("dims", {**INPUT0, "shape": [3], "data": [1, 2, 3]}),
    first("shape is a number", {**INPUT0, "shape": 4}),
    first("shape is null", {**INPUT0, "shape": None}),
    first("dim negative", {**INPUT0, "shape": [-1]}),
    first("dim is a string", {**INPUT0, "shape": ["4"]}),
    first("dim is a float", {**INPUT0, "shape": [4.0]}),
    first("dim too large", {**INPUT0, "shape": [2**63]}, differs=why.HUGE_SHAPE),
    first("dims overflow", {**INPUT0, "shape": [2**32, 2**32]}, differs=why.HUGE_SHAPE),
    first("too few values", {**INPUT0, "data": [1, 2, 3]}),
    first("too many values", {**INPUT0, "data": [1, 2, 3, 4, 5]}),
    first("data is a number", {**INPUT0, "data": 1}),
    first("data is an object", {**INPUT0, "data": {"0": 1}}),
    first("data is null", {**INPUT0, "data": None}),
    first("parameters is an array", {**INPUT0, "parameters": []}),
    first("unknown parameter", {**INPUT0, "parameters": {"unknown": 1}}),
    first("data and binary size", {**INPUT0, "parameters": {"binary_data_size": 16}}),
    first("unknown region", {**WITHOUT["data"], "parameters": {"shared_memory_region": "r"}}),
    sent("optional: left out", "optional_input", tensor("INPUT0", "INT32", [1, 2], [1, 2])),
    sent(
        "optional: given",
        "optional_input",
        *(tensor(n, "INT32", [1, 2], [1, 2]) for n in ("INPUT1", "INPUT0")),
    ),
    sent(
        "optional: required left out", "optional_input", tensor("INPUT1", "INT32", [1, 2], [1, 2])
    ),
    sent("optional: none given", "optional_input"),
    sent(
        "optional: one too many",
        "optional_input",
        *(tensor(n, "INT32", [1, 2], [1, 2]) for n in ("INPUT0", "INPUT1", "X")),
        differs=why.HASH_ORDER,
    ),
    sent("optional: all left out", "identity"),
]

VALUES = [
    value("both", "BOOL", True, False),
    value("numbers", "BOOL", 1, 0),
    value("string", "BOOL", "true"),
    value("null", "BOOL", None),
    *[
        value("limits", f"INT{bits}", -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 0)
        for bits in (8, 16, 32, 64)
    ],
    *[
        value("above", f"INT{bits}", 2 ** (bits - 1), differs=why.BEYOND_RANGE)
        for bits in (8, 16, 32)
    ],
    value("above", "INT64", 2**63),
    value("below", "INT8", -129, differs=why.BEYOND_RANGE),
    value("below", "INT64", -(2**63) - 1),
    *[value("limits", f"UINT{bits}", 0, 2**bits - 1) for bits in (8, 16, 32, 64)],
    *[value("above", f"UINT{bits}", 2**bits, differs=why.BEYOND_RANGE) for bits in (8, 16, 32)],
    value("above", "UINT64", 2**64),
    value("negative", "UINT8", -1),
    value("negative", "UINT64", -1),
    value("whole float", "INT32", 1.0),
    value("fraction", "INT32", 1.5),
    value("string", "INT32", "1"),
    value("bool", "INT32", True),
    value("null", "INT32", None),
    value("string", "UINT16", "1"),
    literal("exponent", "INT32", "[1]", "[1e2]"),
    literal("leading zero", "INT32", "[1]", "[01]"),
    literal("minus zero", "INT32", "[1]", "[-0]"),
    literal("plus sign", "INT32", "[1]", "[+1]"),
    value("numbers", "FP32", 0.1, 1, -2.5, 1e-5, 1e21, 3.4e38, 16777217, -0.0),
    value("too large", "FP32", 1e300, differs=why.BEYOND_RANGE),
    value("string", "FP32", "1"),
    value("bool", "FP32", True),
    value("null", "FP32", None),
    literal("not finite", "FP32", "[3]", "[NaN,Infinity,-Infinity]"),
    literal("short not finite", "FP32", "[2]", "[Inf,-Inf]", differs=why.INF_LITERAL),
    literal("beyond double", "FP64", "[1]", "[1e400]"),
    literal("long digits", "FP64", "[1]", "[0.1234567890123456789012345678901234567890]"),
    value("numbers", "FP64", 0.1, 1e300, -0.0, 1e-5, 1e-7, 1e20, 1e21, 123456789.0, 5e-324, 2**63),
    value("number", "FP16", 1.5),
    value("number", "BF16", 1.5),
    value("texts", "BYTES", "a", "", "ä☃😀", 'quote " slash \\ / tab \t end', "nul\0nul"),
    value("control characters", "BYTES", "".join(map(chr, range(32))) + "\x7f\x80\u2028"),
    value("number", "BYTES", 1),
    value("null", "BYTES", None),
    literal("lone surrogate", "STRING", "[1]", '["\\ud800"]'),
    infer(
        "BYTES: lone surrogate",
        "identity",
        '{"inputs":[{"name":"IN_STRING","shape":[1],"datatype":"BYTES","data":["\\ud800"]}]}',
    ),
    infer(
        "BYTES: bytes that are not UTF-8",
        "identity",
        b'{"inputs":[{"name":"IN_STRING","shape":[1],"datatype":"BYTES","data":["\xff\xfe"]}]}',
        differs=why.NOT_UTF8,
    ),
    sent("BYTES: called STRING", "identity", tensor("IN_STRING", "STRING", [1], ["x"])),
]

SHAPES = [
    literal("zero size", "FP32", "[0]", "[]"),
    literal("zero size nested", "INT8", "[0]", "[[]]"),
    literal("empty shape", "FP32", "[]", "[1]"),
    literal("nested", "FP32", "[2]", "[[1],[2]]"),
    literal("ragged", "FP32", "[3]", "[[1],2,[[[3]]]]"),
    literal("empty lists inside", "FP32", "[2]", "[[],1,[[]],2]"),
    literal("object inside", "FP32", "[1]", "[{}]"),
    literal("values after the last", "FP32", "[2]", "[[1,2],[null]]"),
    sent("matrix: nested", "matrix", tensor("IN_M", "INT32", [2, 3], [[1, 2, 3], [4, 5, 6]])),
    sent("matrix: flat", "matrix", tensor("IN_M", "INT32", [2, 3], [1, 2, 3, 4, 5, 6])),
    sent(
        "matrix: other nesting", "matrix", tensor("IN_M", "INT32", [2, 3], [[1, 2], [3, 4], [5, 6]])
    ),
    sent("matrix: zero rows", "matrix", tensor("IN_M", "INT32", [0, 3], [])),
    sent("matrix: fixed", "matrix", tensor("IN_F", "INT32", [2, 2], [[1, 2], [3, 4]])),
    sent(
        "matrix: fixed, transposed count", "matrix", tensor("IN_F", "INT32", [4, 1], [1, 2, 3, 4])
    ),
    sent("matrix: strings", "matrix", tensor("IN_S", "BYTES", [1, 2], [["a", "b"]])),
    sent("matrix: strings of wrong width", "matrix", tensor("IN_S", "BYTES", [2, 1], ["a", "b"])),
    sent("matrix: one value", "matrix", tensor("IN_ONE", "INT32", [1], [7])),
    sent("matrix: one value without shape", "matrix", tensor("IN_ONE", "INT32", [], [7])),
    sent("reshape: as configured", "reshape", tensor("INPUT", "INT32", [4], [1, 2, 3, 4])),
    sent(
        "reshape: as the model sees it", "reshape", tensor("INPUT", "INT32", [2, 2], [1, 2, 3, 4])
    ),
    sent("reshape: to scalar", "reshape_scalar", tensor("INPUT", "INT32", [3, 1], [1, 2, 3])),
    sent("reshape: scalar sent", "reshape_scalar", tensor("INPUT", "INT32", [3], [1, 2, 3])),
    batch("one", [1, 2], 2),
    batch("largest", [8, 2], 16),
    batch("too large", [9, 2], 18),
    batch("zero", [0, 2], 0, differs=why.BATCH_OF_NONE),
    batch("missing", [2], 2),
    batch("too many dims", [1, 1, 2], 2),
    batch("wrong dims", [1, 3], 3),
    batch("variable dims, batch 2", [2, 2], 4),
    sent(
        "batch: inputs differ",
        "add_sub_batched",
        {**INPUT0, "shape": [1, 4]},
        tensor("INPUT1", "FP32", [2, 4], [1] * 8),
        differs=why.HASH_ORDER,
    ),
    sent(
        "batch: identity of two",
        "identity_batched",
        tensor("IN_INT64", "INT64", [2, 3], [[1, 2, 3], [4, 5, 6]]),
    ),
    sent("batch: no inputs", "identity_batched"),
]

OUTPUTS = [
    outputs("one", [{"name": "OUTPUT1"}]),
    outputs("reversed", [{"name": "OUTPUT1"}, {"name": "OUTPUT0"}]),
    outputs("empty list", []),
    outputs("twice", [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]),
    outputs("unknown", [{"name": "OUTPUT9"}]),
    outputs("empty name", [{"name": ""}]),
    outputs("no name", [{}]),
    outputs("a number", [1]),
    outputs("name is a number", [{"name": 1}]),
    outputs("unknown parameter", [{"name": "OUTPUT0", "parameters": {"unknown": 1}}]),
    outputs("parameters is an array", [{"name": "OUTPUT0", "parameters": []}]),
    outputs("classification", [{"name": "OUTPUT1", "parameters": {"classification": 2}}]),
    outputs("classification zero", [{"name": "OUTPUT1", "parameters": {"classification": 0}}]),
    outputs("classification junk", [{"name": "OUTPUT1", "parameters": {"classification": "x"}}]),
    outputs(
        "unknown region",
        [
            {
                "name": "OUTPUT1",
                "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16},
            }
        ],
    ),
]

PARAMETERS = [
    parameters("every type", {"s": "x", "i": 5, "n": -5, "t": True, "f": False, "d": 1.5}),
    parameters("empty", {}),
    parameters("is an array", []),
    parameters("is null", None),
    parameters("array value", {"a": [1]}),
    parameters("object value", {"a": {}}),
    parameters("null value", {"a": None}),
    parameters("integer limits", {"low": -(2**63), "high": 2**63 - 1}),
    parameters("integer above int64", {"i": 2**63}, differs=why.BIG_PARAMETER),
    parameters("integer above uint64", {"i": 2**64}),
    parameters("escapes", {'ä " key': "☃ \\ \n"}),
    parameters("reserved name", {"triton_x": 1}),
    parameters("empty final response", {"triton_enable_empty_final_response": True}),
    parameters("sequence number", {"sequence_id": 5, "sequence_start": True, "sequence_end": True}),
    parameters("sequence text", {"sequence_id": "abc", "sequence_start": True}),
    parameters("sequence float", {"sequence_id": 1.5}),
    parameters("sequence negative", {"sequence_id": -1}),
    parameters("sequence start junk", {"sequence_start": 1}),
    parameters("sequence end junk", {"sequence_end": "x"}),
    parameters("priority and timeout", {"priority": 3, "timeout": 1_000_000}),
    parameters("priority negative", {"priority": -1}),
    parameters("priority text", {"priority": "x"}),
    parameters("timeout text", {"timeout": "x"}),
    parameters("binary output number", {"binary_data_output": 1}),
    parameters("request id", {}, id="r1"),
]

CASES: list[Case] = [*DOCUMENTS, *INPUTS, *VALUES, *SHAPES, *OUTPUTS, *PARAMETERS]
