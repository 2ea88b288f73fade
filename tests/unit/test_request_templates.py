"""Templates of JSON requests: what they match is what the parser says of the same bytes."""

import json
from dataclasses import astuple, replace

import orjson
import pytest
from hypothesis import given, strategies as st

from gpubridge.errors import BridgeError
from gpubridge.protocol.body import align_inputs, check_strings, input_copy
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


class Slot:
    """Memory of an arena; ``body`` is what it is charged to."""

    def __init__(self, memory):
        self.memory = memoryview(memory)
        self.body = None

    def charge(self, body):
        self.body = body


class Sent(Slot):
    """A header and its data in memory, as a connection leaves them there; and the arena of that."""

    def __init__(self, header, data, room=64):
        self.header = header
        self.begin = 64 - len(header) % 64
        self.start = self.begin + len(header)
        self.following = len(data)
        super().__init__(bytearray(self.begin) + bytearray(header + data) + bytearray(room))
        self.body = object()
        self.lent = [self]

    def allocate(self, nbytes):
        self.lent.append(Slot(bytearray(nbytes)))
        return self.lent[-1]

    def free(self, slot):
        self.lent.remove(slot)

    def match(self, cache):
        return cache.templates.take_json(
            self, self.begin, len(self.header), self.following, lambda _: None, 0, self
        )


def contents(slot, start, places):
    return [bytes(slot.memory[start + at : start + at + nbytes]) for at, nbytes in places]


def expected(config, header, data):
    """Return the parsed request; None for an error."""
    sent = Sent(header, data)
    try:
        form = parse_request(header, config, len(data), any_region)
        if form.packed:
            copy = input_copy(form, memoryview(data), sent).run()
            slot, start, places, moved = copy.slot, 0, copy.places, copy.copied
            check_strings(form, config.name, contents(slot, start, places))
        else:
            slot, start = sent, sent.start
            check_strings(form, config.name, contents(slot, start, form.places))
            places, moved = align_inputs(form, sent.memory, start)
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
        contents(slot, start, places),
    )


def options_of(options):
    return astuple(replace(options, shapes=tuple(options.shapes), shape_id=None))


def found(sent, matched):
    template, request, regions = matched
    form = template.form
    assert not form.packed
    # Another slot is charged as the body was, which is freed.
    assert sent.lent == [request.slot]
    assert request.slot.body is sent.body
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
        contents(request.slot, request.start, request.places),
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
        "ways": [draw(st.sampled_from(["binary", "binary", "JSON", "region"])) for _ in names],
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
            for name, way in zip(skeleton["names"], skeleton["ways"], strict=True):
                entry, content = one_input(draw, name, batch, way)
                if skeleton["reversed"]:
                    entry = dict(reversed(entry.items()))
                document["inputs"].append(entry)
                data += content
    text = json.dumps(document, ensure_ascii=False, indent=skeleton["indent"])
    return text.encode(), draw(st.sampled_from([data, data, data[: len(data) // 2], data + b"x"]))


def region(draw):
    return {
        "shared_memory_region": draw(TEXTS),
        "shared_memory_offset": draw(NUMBERS),
        "shared_memory_byte_size": draw(NUMBERS),
    }


VALUES = {
    "A": st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-9, 9)),
    "B": st.floats(allow_nan=False, allow_infinity=False),
    "S": TEXTS,
}


def one_input(draw, name, batch, way):
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
    if way == "JSON":
        size = {"min_size": count, "max_size": count + draw(st.sampled_from([0, 0, 0, 1]))}
        entry["data"] = draw(st.lists(VALUES[name], **size))
        if draw(st.booleans()):
            entry["data"] = [entry["data"][:1], [entry["data"][1:]]]
        return entry, b""
    if way == "region":
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
        assert sent.lent == [sent]
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


@pytest.mark.parametrize(
    ("datatype", "first", "second"),
    [
        ("FP32", "[1,2]", "[[-0.5e1],[0.1]]"),
        ("FP64", "[1.5,2]", "[ 1e-300 ,\n9007199254740993]"),
        ("INT8", "[1,2]", "[-128,127]"),
        ("UINT64", "[1,2]", "[0,18446744073709551615]"),
        ("BOOL", "[true,true]", "[false,true]"),
        ("BYTES", '["",""]', '["\\ud83d\\ude00\\n","' + "é" * 300 + '"]'),
    ],
)
def test_json_values_may_differ(datatype, first, second):
    config = model_config(f"A {datatype.replace('BYTES', 'STRING')} [2]")
    first, second = (
        b'{"inputs":[{"name":"A","shape":[2],"datatype":"%b","data":%b}]}'
        % (datatype.encode(), values.encode())
        for values in (first, second)
    )
    assert matches(first, second, config, b"")


@pytest.mark.parametrize(
    "wrong",
    '[1]|[1,2,3]|[1,true]|[1,null]|[1,"2"]|[1,2}|[1,2|1|[1,2,]|[1,01]|[1,1e39]|[1,{}]|[1 2]|null'
    f"|[1,2],[1,2]|{'[' * 65}1,2{']' * 65}".split("|"),
)
def test_wrong_json_values_are_for_the_parser(wrong):
    header = '{"inputs":[{"name":"A","shape":[2],"datatype":"FP32","data":%s}]}'
    assert not matches((header % "[1,2]").encode(), (header % wrong).encode(), data=b"")


MIXED = model_config("A FP32 [-1];S STRING [2];B INT8 [-1]")


def mixed(more):
    """A request with JSON values, strings of eight bytes, and ``more`` bytes of numbers."""
    inputs = [
        {"name": "A", "shape": [1], "datatype": "FP32", "data": [1]},
        {"name": "S", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 8}},
        {
            "name": "B",
            "shape": [more],
            "datatype": "INT8",
            "parameters": {"binary_data_size": more},
        },
    ]
    return orjson.dumps({"inputs": inputs})


@pytest.mark.parametrize(
    ("strings", "more", "known"),
    [(bytes(8), 9, True), (b"\1" + bytes(7), 9, False), (bytes(8), 32 << 20, False)],
)
def test_binary_inputs_beside_json_are_copied_unless_they_are_wrong_or_long(strings, more, known):
    cache = FormCache(MIXED)
    cache.parse(mixed(0), 8)
    assert agree(MIXED, cache, mixed(more), strings + bytes(more)) == known


@pytest.mark.parametrize("data", [b"", bytes(3), bytes(5)])
def test_bytes_beside_json_values_are_as_many_as_their_inputs_have(data):
    config = model_config("A FP32 [-1];B FP32 [-1]")
    inputs = [entry("A", 2, parameters={}, data=[1, 2]), entry("B", 1)]
    cache = FormCache(config)
    header = orjson.dumps({"inputs": inputs})
    cache.parse(header, 4)
    assert agree(config, cache, header, bytes(4))
    assert not agree(config, cache, header, data)


def test_templates_hold_no_values_and_long_ones_match():
    cache = FormCache(model_config("A FP32 [-1]"))
    for count in (1, 40_000, 60_000, 5):
        values = [0.25 * each for each in range(count)]
        header = orjson.dumps({"inputs": [entry(count=count, parameters={}, data=values)]})
        assert agree(ONE, cache, header, b"") == (count > 1)
        if count == 1:
            cache.parse(header, 0)
    assert cache.templates.nbytes < 1000


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
    assert contents(sent, request.start, request.places) == [data[:5], data[5:]]
    assert Sent(header, data, room=0).match(cache) is None


def test_a_template_keeps_no_text_of_its_first_request_and_reuses_equal_parameters():
    cache = FormCache(model_config("A FP32 [-1]"))
    entry = {"name": "A", "datatype": "FP32"}

    def ask(identifier, text, count=1):
        given = {**entry, "shape": [count], "data": [1] * count}
        document = {"id": identifier, "inputs": [given], "parameters": {"fixed": 1.5, "text": text}}
        header = orjson.dumps(document)
        matched = Sent(header, b"").match(cache)
        if matched is None:
            return cache.parse(header, 0)
        assert json.loads(matched[1].context.parameters) == document["parameters"]
        assert tuple(matched[1].options.shapes) == (("A", (count,)),)
        return matched

    ask("first" * 100, "x" * 1000)
    template, first, _ = ask("i", "y")
    assert (template.form.identifier, template.form.context.parameters) == ("", "")
    assert ask("j", "y")[1].context is first.context
    for other in (("j", "z"), ("j", "y", 2), ("j", "y"), ("j", "long" * 1000), ("j", "y")):
        assert ask(*other)[1].context is not first.context
