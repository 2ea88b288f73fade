"""Generate requests and responses in compiled code: what Python says of the same bytes, or nothing."""

import json

import orjson
import pytest
from hypothesis import example, given, strategies as st

from gpubridge.errors import BridgeError
from gpubridge.protocol.body import input_copy
from gpubridge.protocol.generate import (
    GenerateForms,
    encode_generated,
    generated_template,
    parse_generate,
)
from gpubridge.protocol.json_tensor import input_from_json
from gpubridge.request import InferResponse
from gpubridge.transport.signatures import Signature, TensorSpec
from tests.fuzz.budget import fuzzed, mutations
from tests.unit.model_configs import model_config
from tests.unit.test_json_values import NUMBERS, SPELLINGS, STRINGS
from tests.unit.test_request_templates import Sent, contents, found, options_of

INPUTS = (
    "A FP32 [-1] optional: true;N INT64 [2,-1] optional: true;S STRING [1] optional: true;"
    "B BOOL [-1,-1] reshape { shape: [-1,1,-1] } optional: true;U UINT8 [3] optional: true"
)
CONFIGS = [model_config(INPUTS), model_config(INPUTS, more="max_batch_size: 4")]
NAMES = ["A", "N", "S", "B", "U", "id", "k", "é", "parameters"]
SCALARS = st.one_of(
    NUMBERS, STRINGS, st.sampled_from(["true", "false", "null", "1", '"a"', "[1]", "{}"])
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=6).map(lambda values: f"[{' , '.join(values)}]"),
    st.lists(st.sampled_from(["1", "2.5", '"x"', "true"]), min_size=6, max_size=6).map(
        lambda values: f"[{','.join(values)}]"
    ),
)
RIGHT = {
    "A": ["1", "[1,-2.5e1]", "[]", "[ 0.1 ]", "[1,[2]]", "[[1],[]]"],
    "N": ["[1,2]", "[-1,0,3,4]", "[1,2,3]"],
    "S": ['"a"', '["\\u00e9\\n"]', '""', '["a","b"]'],
    "B": ["true", "[true,false]"],
    "U": ["[1,2,3]", "[1,2,3,4,5,6]", "[1,2,256]"],
    "id": ['"i"', '"\\u0069"', '""', "7", '"é"'],
    "k": ["0", "7", "-1", "18446744073709551615", '"t"', "1.5", "true", '"\\n"'],
}


@st.composite
def pairs(draw):
    """Draw two bodies with the same members."""
    members = draw(st.lists(st.sampled_from(NAMES), max_size=4))
    nested = draw(st.lists(st.sampled_from(NAMES), max_size=2))
    space = draw(st.sampled_from(["", " ", "\n\t"]))

    def object_of(names):
        parts = [f'"{name}":{space}{value_of(name)}' for name in names]
        return "{" + f",{space}".join(parts) + "}"

    def value_of(name):
        if name == "parameters" and draw(st.integers(0, 5)):
            return object_of(nested)
        return draw(st.one_of(st.sampled_from(RIGHT.get(name, ["1"])), VALUES))

    return object_of(members).encode(), object_of(members).encode()


def expected(config, body):
    """Return what Python says of a body; None for an error."""
    try:
        form = parse_generate(body, config)
    except BridgeError:
        return None
    copy = input_copy(form, memoryview(b""), Sent(b"", b"")).run()
    return (
        form.identifier,
        form.signature,
        form.dims,
        tuple(copy.places),
        copy.copied,
        form.batch_size,
        form.context.encoded(),
        options_of(form.options),
        None,
        {},
        False,
        contents(copy.slot, 0, copy.places),
    )


def match(forms, body):
    sent = Sent(body, b"")
    matched = sent.match(forms)
    return None if matched is None else found(sent, matched)


@fuzzed(5)
@given(
    st.sampled_from(CONFIGS),
    st.one_of(
        pairs(),
        pairs().flatmap(lambda pair: st.tuples(st.just(pair[0]), mutations(st.just(pair[1]), 2))),
    ),
)
@example(CONFIGS[0], (b'{"A":1}', b'\xef\xbb\xbf{"A":1}'))
@example(CONFIGS[0], (b'{"A":1}', b'{"A":1}\0'))
@example(CONFIGS[0], (b'{"A":[1]}', b'{"A":[[1],[]]}'))
@example(CONFIGS[0], (b'{"S":"a"}', b'{"S":"\\ud800"}'))
@example(CONFIGS[0], (b'{"S":"a"}', b'{"S":"\xff"}'))
@example(CONFIGS[0], (b'{"A":1,"parameters":{"k":1}}', b'{"A":1,"parameters":{"A":1}}'))
@example(CONFIGS[0], (b'{"k":1,"A":1}', b'{"k":1,"A":' + b"[" * 70 + b"]" * 70 + b"}"))
def test_a_body_that_has_a_template_is_what_python_says(config, pair):
    forms = GenerateForms(config)
    for body in pair:
        right = expected(config, body)
        for _ in range(2):
            assert match(forms, body) in (None, right)
            if right is not None:
                forms.parse(body)


@pytest.mark.parametrize("spelling", SPELLINGS.split())
def test_numbers_of_all_spellings_are_taken_or_left(spelling):
    forms = GenerateForms(CONFIGS[0])
    forms.parse(b'{"A":[1,2],"N":[1,2]}')
    for body in (f'{{"A":[1,{spelling}],"N":[1,2]}}', f'{{"A":[1,2],"N":[1,{spelling}]}}'):
        # Not JSON, but taken as at Triton.
        left = spelling in ("NaN", "Infinity")
        assert match(forms, body.encode()) == (
            None if left else expected(CONFIGS[0], body.encode())
        )


@pytest.mark.parametrize("config", CONFIGS)
def test_bodies_that_differ_in_values_only_have_one_template(config):
    forms = GenerateForms(config)
    forms.parse('{"id": "0", "A": 1, "k": 0, "parameters": {"é": "x", "S": "y"}}'.encode())
    for number in range(1, 4):
        members = {"id": str(number), "A": number / 3, "k": number}
        members["parameters"] = {"é": "ü" * number, "S": ["\n" * number]}
        body = json.dumps(members, ensure_ascii=False).encode()
        assert expected(config, body) is not None
        assert match(forms, body) == expected(config, body)
    assert len(forms.templates) == 1


def test_no_input_is_a_template_of_inference():
    forms = GenerateForms(CONFIGS[0])
    forms.parse(b'{"A":1}')
    assert match(forms, b'{"k":1}') is None


OUTPUTS = [
    ("FP32", [0.5, -1.0, 1e30]),
    ("FP64", [0.1, 1e300]),
    ("INT8", [-128, 127]),
    ("UINT64", [(1 << 64) - 1]),
    ("BOOL", [True, False]),
    ("BYTES", ["é\n\u2028", '"\\']),
    ("INT64", []),
]


@pytest.mark.parametrize("name", ["OUT", "id", "model_name", "a", 'é"\n'])
@pytest.mark.parametrize("identifier", ["", 'i"é'])
@pytest.mark.parametrize(("datatype", "values"), OUTPUTS)
def test_responses_are_those_of_python(name, identifier, datatype, values):
    signature = Signature(
        (TensorSpec(name, datatype, 1, None), TensorSpec("z", "BYTES", 2, None)), ()
    )
    for some in (values, values[:1]):
        shapes = [(len(some),), (1, 1)]
        data = [
            memoryview(input_from_json("x", kind, (len(given),), given).data)
            for kind, given in ((datatype, some), ("BYTES", ["text"]))
        ]
        template = generated_template(signature, CONFIGS[0], 3)
        text = template.encode(identifier, shapes, data)
        response = InferResponse(signature, shapes, data)
        assert text == b"".join(encode_generated(identifier, response, CONFIGS[0], 3))
        assert orjson.loads(text)


@pytest.mark.parametrize(
    ("datatype", "data"), [("BYTES", b"\2\0\0\0a"), ("FP16", b"ab"), ("FP32", b"abc")]
)
def test_outputs_that_are_none_are_left_to_python(datatype, data):
    signature = Signature((TensorSpec("OUT", datatype, 1, None),), ())
    template = generated_template(signature, CONFIGS[0], 1)
    assert template.encode("", [(1,)], [memoryview(data)]) is None
