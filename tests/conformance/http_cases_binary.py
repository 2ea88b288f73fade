"""Infer with the binary tensor extension: sizes, header lengths, every datatype, raw requests."""

import struct
from typing import Any

from tests.conformance import deliberate as why
from tests.conformance.deliberate import Difference
from tests.conformance.http_case import (
    INPUT0,
    INPUT1,
    Case,
    binary,
    encode,
    infer,
    sent,
    strings,
    tensor,
)

ZEROS = bytes(16)
PAIR = {"inputs": [binary("INPUT0", "FP32", [4], 16), INPUT1]}
BOTH = {"inputs": [binary("INPUT0", "FP32", [4], 16), binary("INPUT1", "FP32", [4], 16)]}
EVERY_DATATYPE = [  # name in the model, v2 datatype, two elements
    ("BOOL", "BOOL", b"\1\0"),
    ("INT8", "INT8", struct.pack("<2b", 1, -128)),
    ("INT16", "INT16", struct.pack("<2h", 1, -32768)),
    ("INT32", "INT32", struct.pack("<2i", 1, -(2**31))),
    ("INT64", "INT64", struct.pack("<2q", 1, -(2**63))),
    ("UINT8", "UINT8", b"\1\xff"),
    ("UINT16", "UINT16", struct.pack("<2H", 1, 65535)),
    ("UINT32", "UINT32", struct.pack("<2I", 1, 2**32 - 1)),
    ("UINT64", "UINT64", struct.pack("<2Q", 1, 2**64 - 1)),
    ("FP16", "FP16", struct.pack("<2e", 1.5, -2.0)),
    ("FP32", "FP32", struct.pack("<2f", 1.5, float("nan"))),
    ("FP64", "FP64", struct.pack("<2d", 1.5, float("inf"))),
    ("BF16", "BF16", b"\xc0\x3f\x00\xc0"),
    ("STRING", "BYTES", strings(b"a\xff", b"")),
]


def size(name: str, value: object, tail: bytes = ZEROS) -> Case:
    document = {"inputs": [binary("INPUT0", "FP32", [4], value), INPUT1]}
    return infer(f"binary size: {name}", "add_sub", document, tail=tail)


def header_length(name: str, value: str | None) -> Case:
    fields: dict[str, Any] = {"header_length": value} if value is not None else {}
    return infer(f"header length: {name}", "add_sub", encode(PAIR) + ZEROS, **fields)


def byte_strings(name: str, data: bytes, shape: tuple[int, ...] = (2,)) -> Case:
    document = {"inputs": [binary("IN_STRING", "BYTES", list(shape), len(data))]}
    return infer(f"byte strings: {name}", "identity", document, tail=data)


def answer(
    name: str, outputs: object = None, *, differs: Difference | None = None, **parameters: object
) -> Case:
    document: dict[str, object] = {"inputs": [INPUT0, INPUT1]}
    if outputs is not None:
        document["outputs"] = outputs
    if parameters:
        document["parameters"] = parameters
    return infer(f"binary output: {name}", "add_sub", document, differs=differs)


def asked(name: str, value: object = True) -> dict[str, object]:
    return {"name": name, "parameters": {"binary_data": value}}


def raw(name: str, model: str, body: bytes, length: str = "0", **fields: Any) -> Case:
    return infer(f"raw: {name}", model, body, header_length=length, **fields)


def round_trips() -> list[Case]:
    """Every datatype as binary in, and out both as binary and as JSON; alone and in a batch of two."""
    cases = []
    for name, datatype, data in EVERY_DATATYPE:
        given = binary(f"IN_{name}", datatype, [2], len(data))
        rows = binary(f"IN_{name}", datatype, [2, 1], len(data))
        out = {"parameters": {"binary_data_output": True}}
        cases += [
            sent(f"binary {name}: out as JSON", "identity", given, tail=data),
            infer(
                f"binary {name}: out as binary", "identity", {"inputs": [given], **out}, tail=data
            ),
            infer(
                f"binary {name}: batch of two",
                "identity_batched",
                {"inputs": [rows], **out},
                tail=data,
            ),
        ]
    return cases


def everything_at_once() -> Case:
    inputs = [binary(f"IN_{name}", dt, [2], len(data)) for name, dt, data in EVERY_DATATYPE]
    document = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    tail = b"".join(data for _, _, data in EVERY_DATATYPE)
    name = "binary: all datatypes in one request"
    return infer(name, "identity", document, tail=tail, differs=why.HASH_ORDER)


SIZES = [
    size("right", 16),
    size("smaller than the shape", 12, ZEROS[:12]),
    size("larger than the shape", 20, ZEROS + b"1234"),
    size("larger than the body", 16, ZEROS[:10]),
    size("smaller than the body", 16, ZEROS + b"1234"),
    size("zero", 0),
    size("zero, nothing sent", 0, b""),
    size("negative", -1),
    size("text", "16"),
    size("float", 16.0),
    size("null", None),
    size("bool", True),
    size("array", [16]),
    size("1 TiB", 2**40),
    size("int64 limit", 2**63 - 1),
    size("uint64 limit", 2**64 - 1),
    size("beyond uint64", 2**64),
    infer("binary: both inputs", "add_sub", BOTH, tail=struct.pack("<8f", *range(8))),
    infer("binary: second input short", "add_sub", BOTH, tail=bytes(24)),
    infer(
        "binary: JSON first, binary second",
        "add_sub",
        {"inputs": [INPUT0, binary("INPUT1", "FP32", [4], 16)]},
        tail=struct.pack("<4f", 1, 2, 3, 4),
    ),
    sent("binary: zero-size tensor", "identity", binary("IN_FP32", "FP32", [0], 0), tail=b""),
    infer(
        "binary: zero-size tensor out as binary",
        "identity",
        {
            "inputs": [tensor("IN_FP32", "FP32", [0], [])],
            "parameters": {"binary_data_output": True},
        },
    ),
    infer(
        "binary: BOOL of other bytes",
        "identity",
        {"inputs": [binary("IN_BOOL", "BOOL", [2], 2)], "parameters": {"binary_data_output": True}},
        tail=b"\2\xff",
    ),
]

HEADER_LENGTHS = [
    header_length("right", str(len(encode(PAIR)))),
    header_length("missing", None),
    header_length("larger than the body", "99999"),
    header_length("the whole body", str(len(encode(PAIR)) + 16)),
    header_length("one byte short", str(len(encode(PAIR)) - 1)),
    header_length("one byte long", str(len(encode(PAIR)) + 1)),
    header_length("negative", "-1"),
    header_length("word", "abc"),
    header_length("zero", "0"),
    header_length("empty", ""),
    header_length("five", "5"),
    header_length("exponent", "1e3"),
    header_length("number and word", "5abc"),
    header_length("plus sign", "+5"),
    header_length("hexadecimal", "0x10"),
    header_length("beyond uint64", "99999999999999999999"),
]

BYTE_STRINGS = [
    byte_strings("right", strings(b"ab", b"cde")),
    byte_strings("empty strings", strings(b"", b"")),
    byte_strings("no elements", b"", (0,)),
    byte_strings("cut in the length", strings(b"ab", b"")[:-2]),
    byte_strings("cut in the string", strings(b"ab", b"cde")[:-1]),
    byte_strings("length past the end", struct.pack("<I", 100) + b"ab"),
    byte_strings("length of 4 GiB", struct.pack("<I", 2**32 - 1) + b"ab"),
    byte_strings("one element missing", strings(b"ab")),
    byte_strings("one element too many", strings(b"a", b"b", b"c")),
    byte_strings("bytes after the last", strings(b"a", b"b") + b"x"),
    byte_strings("nothing", b""),
]

ANSWERS = [
    answer("one of two", [asked("OUTPUT1"), {"name": "OUTPUT0"}]),
    answer("both, reversed", [asked("OUTPUT1"), asked("OUTPUT0")]),
    answer("refused", [asked("OUTPUT1", False)]),
    answer("a number", [asked("OUTPUT1", 1)]),
    answer("a text", [asked("OUTPUT1", "true")]),
    answer("for all", binary_data_output=True),
    answer(
        "for all but one", [asked("OUTPUT0", False), {"name": "OUTPUT1"}], binary_data_output=True
    ),
    answer("for none", [{"name": "OUTPUT1"}], binary_data_output=False),
    answer(
        "of a classification",
        [{"name": "OUTPUT1", "parameters": {"classification": 2, "binary_data": True}}],
    ),
]

RAW = [
    raw("one value", "request_view", struct.pack("<i", 5)),
    raw("too long", "request_view", bytes(6)),
    raw("too short", "request_view", bytes(2)),
    raw("empty", "request_view", b""),
    raw("matrix", "reshape", struct.pack("<4i", 1, 2, 3, 4)),
    raw("one string", "misbehaving", b"none"),
    raw("two inputs", "add_sub", bytes(32)),
    raw("batched", "reshape_scalar", struct.pack("<i", 5)),
    raw("error keeps its form", "misbehaving", b"raise_value_error"),
]

CASES: list[Case] = [
    *SIZES,
    *HEADER_LENGTHS,
    *round_trips(),
    everything_at_once(),
    *BYTE_STRINGS,
    *ANSWERS,
    *RAW,
]
