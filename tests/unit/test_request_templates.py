"""Templates of JSON requests: what they match is what the parser says of the same bytes."""

import json
from dataclasses import astuple, replace

import orjson
import pytest
from hypothesis import example, given, strategies as st

from gpubridge.errors import BridgeError
from gpubridge.protocol.body import align_inputs, check_strings
from gpubridge.protocol.infer_request import FormCache, parse_request
from gpubridge.protocol.request_templates import TEMPLATE_BYTES
from tests.fuzz.budget import fuzzed
from tests.unit.model_configs import model_config

CONFIGS = [
    model_config("A FP32 [-1];B FP64 [2,-1];S STRING [-1]", "X FP32 [-1];Y FP32 [-1]"),
    model_config(
        "A FP32 [-1];B FP64 [2,-1];S STRING [-1] optional: true",
        "X FP32 [-1];Y FP32 [-1]",
        "max_batch_size: 4",
    ),
    model_config(
        "A FP32 [-1] reshape { shape: [1,-1,1] };B FP64 [2,-1] reshape { shape: [1,2,-1] }"
        ";S STRING [1] reshape { shape: [1,1] }",
        "X FP32 [-1];Y FP32 [-1]",
    ),
    model_config(
        "A FP32 [-1];B FP64 [2,-1] reshape { shape: [2,1,-1] };S STRING [1] reshape { shape: [] }",
        "X FP32 [-1];Y FP32 [-1]",
        "max_batch_size: 4",
    ),
]
SIZES = {"A": 4, "B": 8, "S": 0}


def any_region(region):
    """Every region is registered."""


def strings(count, seed):
    return b"".join(
        (length := (seed + i) % 7).to_bytes(4, "little") + b"x" * length for i in range(count)
    )


class Sent:
    """A header and its data in memory, as a connection leaves them there."""

    def __init__(self, header, data, room=64):
        self.header = header
        self.begin = 64 - len(header) % 64
        self.start = self.begin + len(header)
        self.following = len(data)
        self.memory = memoryview(bytearray(self.begin) + bytearray(header + data) + bytearray(room))

    def match(self, cache):
        return cache.templates.take_json(
            self, self.begin, len(self.header), self.following, lambda _: None, 0
        )

    def inputs(self, places):
        return [
            bytes(self.memory[self.start + at : self.start + at + nbytes]) for at, nbytes in places
        ]


def expected(config, header, data):
    """Return the parsed request; None for an error."""
    sent = Sent(header, data)
    try:
        form = parse_request(header, config, len(data), any_region)
        assert not form.packed
        views = [
            sent.memory[sent.start + at : sent.start + at + nbytes] for at, nbytes in form.places
        ]
        check_strings(form, config.name, views)
        places, moved = align_inputs(form, sent.memory, sent.start)
    except BridgeError:
        return None
    return (
        form.identifier,
        form.signature,
        form.dims,
        tuple(places),
        moved,
        form.batch_size,
        form.context.encoded(),
        options_of(form.options),
        form.regions() if form.shared else None,
        {name: (output.binary, output.classes) for name, output in (form.outputs or {}).items()},
        form.binary_default,
        sent.inputs(places),
    )


def options_of(options):
    return astuple(replace(options, shapes=tuple(options.shapes), shape_id=None))


def found(sent, matched):
    template, request, regions = matched
    form = template.form
    return (
        request.identifier,
        request.signature,
        request.dims,
        tuple(request.places),
        request.copied,
        request.batch_size,
        request.context.encoded(),
        options_of(request.options),
        regions,
        {name: (output.binary, output.classes) for name, output in (form.outputs or {}).items()},
        form.binary_default,
        sent.inputs(request.places),
    )


NUMBERS = st.one_of(
    st.integers(0, 9), st.sampled_from([0, 1, 10**17, 10**18, (1 << 63) - 1, (1 << 64) - 1])
)
TEXTS = st.one_of(
    st.text(max_size=5), st.sampled_from(["", "é", "a" * 130, '"', "\\", "\U0001f600"])
)


@st.composite
def parameters(draw):
    """Draw the varying parameters of a request, as functions of a drawing."""
    drawn = draw(
        st.lists(
            st.sampled_from(
                [
                    ("priority", NUMBERS),
                    ("timeout", NUMBERS),
                    ("sequence_id", NUMBERS),
                    ("sequence_id", TEXTS),
                    ("sequence_start", st.booleans()),
                    ("binary_data_output", st.booleans()),
                    ("mine", NUMBERS),
                    ("other", TEXTS),
                    ("float", st.floats(allow_nan=False, allow_infinity=False)),
                ]
            ),
            max_size=4,
        )
    )
    return dict(drawn)


@st.composite
def skeletons(draw):
    """Draw the shared part of two requests: members, their order and white space."""
    names = draw(st.lists(st.sampled_from("ABS"), unique=True, min_size=1))
    return {
        "names": names,
        "regions": [draw(st.integers(0, 3)) == 3 for _ in names],
        "id": draw(st.booleans()),
        "parameters": draw(parameters()) if draw(st.booleans()) else None,
        "outputs": draw(st.lists(st.sampled_from("XY"), max_size=2)),
        "output_region": draw(st.booleans()),
        "order": draw(st.permutations(["id", "inputs", "outputs", "parameters"])),
        "reversed": draw(st.booleans()),
        "indent": draw(st.sampled_from([None, 1])),
    }


@st.composite
def requests(draw, skeleton, config):
    """A header of a skeleton, and its data, which are mostly right."""
    batch = draw(st.integers(0, 5)) if config.max_batch_size else 0
    document = {}
    data = b""
    for member in skeleton["order"]:
        if member == "id" and skeleton["id"]:
            document["id"] = draw(TEXTS)
        elif member == "parameters" and skeleton["parameters"] is not None:
            document["parameters"] = {
                name: draw(values) for name, values in skeleton["parameters"].items()
            }
        elif member == "outputs" and skeleton["outputs"]:
            document["outputs"] = [
                {"name": name, "parameters": region(draw) if skeleton["output_region"] else {}}
                for name in skeleton["outputs"]
            ]
        elif member == "inputs":
            document["inputs"] = []
            for name, shared in zip(skeleton["names"], skeleton["regions"], strict=True):
                entry, content = one_input(draw, name, batch, shared)
                if skeleton["reversed"]:
                    entry = dict(reversed(entry.items()))
                document["inputs"].append(entry)
                data += content
    text = json.dumps(document, ensure_ascii=False, indent=skeleton["indent"])
    return text.encode(), data[: draw(st.sampled_from([len(data), len(data), len(data) // 2]))]


def region(draw):
    return {
        "shared_memory_region": draw(TEXTS),
        "shared_memory_offset": draw(NUMBERS),
        "shared_memory_byte_size": draw(NUMBERS),
    }


def one_input(draw, name, batch, shared):
    n = draw(st.integers(0, 3))
    shape = {"A": [n], "B": [2, n], "S": [draw(st.sampled_from([1, n]))]}[name]
    if batch:
        shape.insert(0, batch)
    count = 1
    for dim in shape:
        count *= dim
    content = strings(count, n) if name == "S" else b"\1" * (count * SIZES[name])
    entry = {
        "name": name,
        "shape": shape,
        "datatype": {"A": "FP32", "B": "FP64"}.get(name, "BYTES"),
    }
    if shared:
        entry["parameters"] = {**region(draw), "shared_memory_byte_size": len(content)}
        return entry, b""
    entry["parameters"] = {"binary_data_size": len(content)}
    return entry, content


def agree(config, cache, header, data):
    """Check that a match equals the parser's result, and that a mismatch leaves the memory as it was."""
    sent = Sent(header, data)
    before = bytes(sent.memory)
    matched = sent.match(cache)
    if matched is None:
        assert bytes(sent.memory) == before
        return False
    assert found(sent, matched) == expected(config, header, data)
    return True


@fuzzed(2)
@given(st.data())
def test_matching_requests_equal_the_parsers_result(data):
    config = data.draw(st.sampled_from(CONFIGS))
    skeleton = data.draw(skeletons())
    cache = FormCache(config, any_region)
    for _ in range(3):
        header, content = data.draw(requests(skeleton, config))
        if not agree(config, cache, header, content):
            try:
                cache.parse(header, len(content))
            except BridgeError:
                continue
            # It is a template now, unless the parser alone can tell what it means.
            assert agree(config, cache, header, content) or not is_plain(config, header, content)


def is_plain(config, header, data):
    document = json.loads(header)
    if b"\\" in json.dumps(document.get("id", ""), ensure_ascii=False).encode():
        return False
    outputs = [output["name"] for output in document.get("outputs", ())]
    return expected(config, header, data) is not None and len(set(outputs)) == len(outputs)


MUTATIONS = st.one_of(
    st.sampled_from(
        [b"", b"0", b"-", b".5", b"e2", b'"', b"\\", b"\\u0041", b"{", b"}", b"[", b"]", b",", b":"]
    ),
    st.sampled_from(
        [b"\0", b"\1", b"\2", b"\x14", b"\xef\xbb\xbf", b"\xff", b"\xed\xa0\x80", b" ", b"\n", b"1"]
    ),
    st.sampled_from(
        [b"null", b"true", b"NaN", b'"data":[1],', b'"id":"x",', b"18446744073709551616", b"9" * 19]
    ),
)


@fuzzed(4)
@given(st.data())
def test_no_change_of_the_bytes_makes_it_match_wrongly(data):
    config = data.draw(st.sampled_from(CONFIGS))
    cache = FormCache(config, any_region)
    header, content = data.draw(requests(data.draw(skeletons()), config))
    try:
        cache.parse(header, len(content))
    except BridgeError:
        return
    for _ in range(8):
        at = data.draw(st.integers(0, len(header)))
        gone = data.draw(st.integers(0, 3))
        changed = header[:at] + data.draw(MUTATIONS) + header[at + gone :]
        agree(config, cache, changed, content)


@given(st.binary(max_size=200))
@example(b"{" * 100)
@example(b'{"inputs":' + b"[" * 100)
@example(b'{"id":"')
@example(b'{"id":"\\')
def test_no_bytes_crash_it(header):
    assert Sent(header, b"").match(FormCache(CONFIGS[0])) is None


def entry(name="A", count=2, **members):
    return {
        "name": name,
        "shape": [count],
        "datatype": "FP32",
        "parameters": {"binary_data_size": 4 * count},
        **members,
    }


ONE = model_config("A FP32 [-1]")


def matches(first, second, config=ONE, data=bytes(8)):
    cache = FormCache(config, any_region)
    cache.parse(first, len(data))
    return agree(config, cache, second, data)


def test_ids_dims_sizes_and_values_may_differ():
    cache = FormCache(ONE)
    for number in range(50):
        header = orjson.dumps(
            {
                "id": "x" * number,
                "inputs": [entry(count=number)],
                "parameters": {
                    "priority": number,
                    "timeout": 10**number % 2**63,
                    "mine": f"{number}",
                    "sequence_start": True,
                },
            }
        )
        assert agree(ONE, cache, header, bytes(4 * number)) == (number > 0)
        if number == 0:
            cache.parse(header, 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b'"parameters":{"n":1}', b'"parameters":{"n":1.0}'),
        (b'"parameters":{"n":1}', b'"parameters":{"n":-1}'),
        (b'"parameters":{"n":1}', b'"parameters":{"n":1e0}'),
        (b'"parameters":{"n":1}', b'"parameters":{"n":true}'),
        (b'"parameters":{"n":1}', b'"parameters":{"n":"1"}'),
        (b'"parameters":{"n":1}', b'"parameters":{"n":18446744073709551616}'),
        (b'"parameters":{"sequence_id":1}', b'"parameters":{"sequence_id":"1"}'),
        (b'"id":"a"', b'"id":"\\u0061"'),
        (b'"id":"a"', b'"i\\u0064":"a"'),
        (b'"id":"a"', b'"id":"a","id":"b"'),
        (b'"x":[1]', b'"x":[2]'),
    ],
)
def test_other_values_make_another_skeleton(first, second):
    inputs = b',"inputs":[' + orjson.dumps(entry()) + b"]}"
    assert matches(b"{" + first + inputs, b"{" + first + inputs)
    assert not matches(b"{" + first + inputs, b"{" + second + inputs)


def test_depth_has_a_limit():
    def nested(depth):
        inner = b"[" * (depth - 1) + b"]" * (depth - 1)
        return b'{"inputs":[' + orjson.dumps(entry()) + b'],"x":' + inner + b"}"

    assert matches(nested(16), nested(16))
    assert not matches(nested(17), nested(17))


def test_values_as_json_are_no_template():
    header = orjson.dumps({"inputs": [entry(parameters={}, data=[1, 2])]})
    assert not matches(header, header, data=b"")


def test_many_tensors_have_a_template():
    names = [f"a_feature_of_a_wide_table_{i}" for i in range(500)]
    config = model_config(
        ";".join(f"{name} FP32 [-1]" for name in names),
        ";".join(f"OUTPUT_{i} FP32 [-1]" for i in range(500)),
    )
    outputs = [{"name": f"OUTPUT_{i}", "parameters": {"binary_data": True}} for i in range(500)]
    first, second = (
        orjson.dumps({"id": each, "inputs": [entry(name, n) for name in names], "outputs": outputs})
        for each, n in (("1", 16), ("22", 8))
    )
    cache = FormCache(config)
    cache.parse(first, 500 * 64)
    assert agree(config, cache, second, bytes(500 * 32))


def test_remembered_templates_have_a_limit():
    cache = FormCache(ONE)
    for number in range(600):
        header = orjson.dumps({"inputs": [entry()], "x": [number] * 1000})
        cache.parse(header, 8)
        assert agree(ONE, cache, header, bytes(8))
    assert cache.templates.nbytes <= TEMPLATE_BYTES
    assert len(cache.templates) < 600
    # The last ones are there, the first ones are not.
    assert not agree(ONE, cache, orjson.dumps({"inputs": [entry()], "x": [0] * 1000}), bytes(8))


def test_a_template_in_use_stays():
    cache = FormCache(ONE)
    used = orjson.dumps({"inputs": [entry()], "x": "used"})
    cache.parse(used, 8)
    for number in range(600):
        cache.parse(orjson.dumps({"inputs": [entry()], "x": [number] * 1000}), 8)
        assert agree(ONE, cache, used, bytes(8))
    assert len(cache.templates) < 600


def test_long_headers_and_refused_ones_are_not_remembered():
    cache = FormCache(ONE)
    cache.parse(orjson.dumps({"inputs": [entry()], "x": " " * 270_000}), 8)
    for _ in range(3):
        with pytest.raises(BridgeError):
            cache.parse(b"nope", 0)
    assert len(cache.templates) == 0


def test_inputs_move_to_where_they_are_aligned():
    config = model_config("S STRING [-1];A FP64 [-1]")
    inputs = [
        {"name": "S", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}},
        {"name": "A", "shape": [2], "datatype": "FP64", "parameters": {"binary_data_size": 16}},
    ]
    header = orjson.dumps({"inputs": inputs})
    data = b"\1\0\0\0x" + bytes(range(16))
    cache = FormCache(config)
    cache.parse(header, len(data))
    sent = Sent(header, data)
    _, request, _ = sent.match(cache)
    assert (request.copied, request.places) == (16, ((0, 5), (8, 16)))
    assert sent.inputs(request.places) == [data[:5], data[5:]]
    assert Sent(header, data, room=0).match(cache) is None
