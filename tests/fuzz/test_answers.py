"""Answers of models as JSON and as classes: what they say is what the model has said, or a refusal."""

import json
import math

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from gpubridge.errors import ErrorCode
from gpubridge.protocol.classification import classified
from gpubridge.protocol.generate import encode_generated, generated_template
from gpubridge.protocol.infer_request import parse_request
from gpubridge.protocol.infer_response import encode_response
from gpubridge.request import InferResponse
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.datatypes import DATATYPES
from gpubridge.tensor.dtypes import numpy_dtype
from gpubridge.transport.signatures import Signature, TensorSpec
from tests.fuzz.budget import fuzzed
from tests.fuzz.json_values import PARAMETERS
from tests.fuzz.refusals import tried
from tests.unit.model_configs import model_config

_CONFIG = model_config("A FP32 [-1] optional: true")
_BATCHED = model_config("A FP32 [-1]", more="max_batch_size: 4")


@fuzzed(2)
@given(
    st.sampled_from(list(DATATYPES)),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(1, (1 << 64) - 1),
    st.booleans(),
    st.data(),
)
def test_answers_are_encoded_in_every_form_or_refused(datatype, shape, classes, batched, data):
    count = int(np.prod(shape, dtype=int))
    if datatype == "BYTES":
        content = data.draw(st.one_of(st.just(b"\2\0\0\0\xc3\xa9" * count), st.binary(max_size=20)))
        spec = TensorSpec("OUT", datatype, len(shape), None)
    else:
        itemsize = np.dtype(numpy_dtype(datatype) or "u2").itemsize
        content = data.draw(st.binary(min_size=count * itemsize, max_size=count * itemsize))
        spec = TensorSpec("OUT", datatype, len(shape), itemsize)
    config = _BATCHED if batched and shape else _CONFIG
    parameters = data.draw(st.one_of(st.none(), PARAMETERS))
    response = InferResponse(
        Signature((spec,), ()), (tuple(shape),), [memoryview(content)], parameters
    )
    form = parse_request(b'{"inputs":[]}', _CONFIG, 0)
    values = _values_of(spec, count, content)

    header = _told(lambda: encode_response(form, form.identifier, response, config, 1).header)
    generated = _told(lambda: encode_generated("", response, config, 1))
    template = generated_template(response.signature, config, 1)
    plain = template.encode("", response.shapes, response.buffers)
    assert (plain is None) == (generated is None)
    assert parameters or plain is None or repr(_told(lambda: plain)) == repr(generated)
    assert (header is None) == (generated is None) == (values is None)
    if values is not None:
        (output,) = header["outputs"]
        assert (output["name"], output["datatype"]) == ("OUT", datatype)
        # As text, where NaN is NaN.
        assert repr(output["data"]) == repr(values)
        assert output["shape"] == shape
        assert repr(generated["OUT"]) == repr(values[0] if count == 1 else values)

    ranked, refusal = tried(classified, response, {"OUT": classes}, config)
    if datatype in ("BOOL", "BYTES", "FP16", "BF16"):
        assert refusal.code is ErrorCode.INVALID_ARG
    else:
        assert refusal is None
        rank = 1 if config.max_batch_size else 0
        _check_ranks(ranked, values, shape[:rank], shape[rank:], classes)


def _told(encode):
    """Return what an answer says, or None where it is refused."""
    text, refusal = tried(encode)
    if refusal is not None:
        assert refusal.code in (ErrorCode.INVALID_ARG, ErrorCode.INTERNAL)
        return None
    pieces = text if isinstance(text, list) else [text]
    return json.loads(b"".join(pieces).decode(errors="surrogateescape"))


def _values_of(spec, count, content):
    """Return the values of a tensor as JSON tells them; None where it cannot, or they are none."""
    if spec.datatype in ("FP16", "BF16"):
        return None
    if spec.datatype != "BYTES":
        return np.frombuffer(content, numpy_dtype(spec.datatype)).tolist()
    values = []
    for _ in range(count):
        size = int.from_bytes(content[:4], "little")
        if len(content) < 4 + size:
            return None
        values.append(content[4 : 4 + size].decode(errors="surrogateescape"))
        content = content[4 + size :]
    return None if content else values


def _check_ranks(ranked, values, batch, shape, classes):
    """Of each row, the highest values come first, each with its place."""
    ((spec,), (told,)) = ranked.signature.tensors, ranked.shapes
    width = math.prod(shape)
    rows = [values[at : at + width] for at in range(0, len(values), width)] if values else []
    most = min(classes, width)
    assert (spec.datatype, told) == ("BYTES", (*batch, most))
    texts = bytes_codec.decode(ranked.buffers[0], len(rows) * most).tolist()
    for row in rows:
        found, texts = [text.decode().split(":") for text in texts[:most]], texts[most:]
        keys = [-math.inf if value != value else value for value in row]
        assert len({place for _, place in found}) == most
        assert [keys[int(place)] for _, place in found] == sorted(keys, reverse=True)[:most]
        for value, place in found:
            there = row[int(place)]
            assert value == (f"{there:f}" if type(there) is float else str(there))
    assert texts == []
