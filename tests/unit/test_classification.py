"""Classes instead of values: which, in what order, and how they are spelt."""

import json

import numpy as np
import pytest

from gpubridge.config import load_model_config
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol.classification import classified
from gpubridge.protocol.infer_request import parse_request
from gpubridge.protocol.infer_response import encode_response, formats_more_than
from gpubridge.protocol.json_tensor import data_to_json
from gpubridge.request import InferResponse
from gpubridge.tensor import bytes_codec
from gpubridge.transport.signatures import Signature, TensorSpec

LABELS = b"cat\ndog\n\nbird house\nfish"


def write_model(tmp_path, batch=8, rest='label_filename: "labels.txt"', dims="[ -1 ]"):
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").touch()
    (directory / "labels.txt").write_bytes(LABELS)
    (directory / "config.pbtxt").write_text(
        f'backend: "python" max_batch_size: {batch} '
        'input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } '
        f'output {{ name: "OUT" data_type: TYPE_FP32 dims: {dims} {rest} }}'
    )
    return directory


def config_of(tmp_path, **options):
    return load_model_config(write_model(tmp_path, **options), gpu_count=0)


def classes(config, array, count, datatype="FP32"):
    spec = TensorSpec("OUT", datatype, array.ndim, array.itemsize)
    response = InferResponse(Signature((spec,), ()), (array.shape,), [memoryview(array.tobytes())])
    answer = classified(response, {"OUT": count}, config)
    (spec,), (shape,), (buffer,) = answer.signature.tensors, answer.shapes, answer.buffers
    assert spec.datatype == "BYTES"
    assert spec.rank == len(shape)
    elements = int(np.prod(shape))
    return shape, [e.decode() for e in bytes_codec.decode(bytes(buffer), elements).tolist()]


def test_the_highest_of_each_row_with_the_labels_that_there_are(tmp_path):
    values = np.array([[0.1, 5.25, -3, 1e-9, 1e20, 0.5]], np.float32)
    config = config_of(tmp_path)
    # As Triton 2.51 spells them.
    assert classes(config, values, 100) == (
        (1, 6),
        [
            "100000002004087734272.000000:4:fish",
            "5.250000:1:dog",
            "0.500000:5",
            "0.100000:0:cat",
            "0.000000:3:bird house",
            "-3.000000:2",
        ],
    )
    assert classes(config, values.reshape(2, 3), 2) == (
        (2, 2),
        ["5.250000:1:dog", "0.100000:0:cat", "100000002004087734272.000000:1:dog", "0.500000:2"],
    )


@pytest.mark.parametrize("count", [1, 3, 40, 1000])
def test_few_of_many_are_those_that_sorting_all_would_give(tmp_path, count):
    values = np.random.default_rng(1).integers(0, 50, 1000).astype(np.int32)
    expected = sorted(range(1000), key=lambda i: (-values[i], i))[:count]
    config = config_of(tmp_path, batch=0, rest="")
    _, found = classes(config, values, count, "INT32")
    assert [int(text.split(":")[1]) for text in found] == expected


def header(parameters):
    return (
        b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1,4],'
        b'"parameters":{"binary_data_size":16}}],"outputs":[{"name":"OUT","parameters":'
        + parameters
        + b"}]}"
    )


def test_an_output_keeps_the_shape_of_its_classes_whatever_its_reshape(tmp_path):
    config = config_of(tmp_path, rest="reshape { shape: [ 4 ] }", dims="[ 2, 2 ]")
    form = parse_request(header(b'{"classification":4}'), config, 16)
    values = np.array([[1, 2, 3, 4]], np.float32)
    for _ in range(2):
        response = InferResponse(
            Signature((TensorSpec("OUT", "FP32", 2, 4),), ()),
            ((1, 4),),
            [memoryview(values).cast("B")],
        )
        answer = encode_response(form, form.identifier, response, config, 1)
        assert b'"shape":[1,4]' in answer.header
        assert b'"data":["4.000000:3","3.000000:2"' in answer.header
    assert not answer.buffers


@pytest.mark.parametrize(
    ("parameters", "code", "text"),
    [
        (b'{"classification":-1}', ErrorCode.INVALID_ARG, "Unable to set 'classification'"),
        (b'{"classification":"2"}', ErrorCode.INVALID_ARG, "non-unsigned-integer"),
        (b'{"classification":true}', ErrorCode.INVALID_ARG, "non-unsigned-integer"),
        (
            b'{"classification":2,"shared_memory_region":"x"}',
            ErrorCode.INVALID_ARG,
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
    ],
)
def test_bad_counts_are_refused_in_tritons_words(tmp_path, parameters, code, text):
    with pytest.raises(BridgeError, match=text) as caught:
        parse_request(header(parameters), config_of(tmp_path), 16)
    assert caught.value.code == code


@pytest.mark.parametrize("name", ["../other/labels.txt", "/etc/hostname", "link"])
def test_labels_outside_of_the_models_directory_are_refused(tmp_path, name):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "labels.txt").write_text("secret\n")
    directory = write_model(tmp_path, rest=f'label_filename: "{name}"')
    (directory / "link").symlink_to(tmp_path / "other" / "labels.txt")
    with pytest.raises(BridgeError, match="label_filename in the model's directory"):
        load_model_config(directory, gpu_count=0)


def test_a_label_file_that_is_not_there_fails_the_load(tmp_path):
    with pytest.raises(
        BridgeError, match=r"failed to open text file for read .*none\.txt: No such"
    ):
        load_model_config(write_model(tmp_path, rest='label_filename: "none.txt"'), gpu_count=0)


def test_labels_that_are_no_text_can_still_be_told():
    data = bytes_codec.encode(np.array([b"1:0:\xff"], object))
    assert data_to_json("OUT", "BYTES", 1, memoryview(data)).startswith(b'["1:0:')


def test_many_classes_are_in_order_across_rows_and_pieces(tmp_path):
    values = np.random.default_rng(2).permutation(3 * 5000).reshape(3, 5000).astype(np.float32)
    shape, found = classes(config_of(tmp_path, rest=""), values, 5000)
    assert shape == (3, 5000)
    wanted = [f"{row[i]:f}:{i}" for row in values for i in np.argsort(-row).tolist()]
    assert found == wanted


@pytest.mark.parametrize(("parameters", "heavy"), [({"classification": 2}, True), ({}, False)])
def test_classes_are_made_beside_others_however_they_are_told(tmp_path, parameters, heavy):
    config = config_of(tmp_path)
    output = {"name": "OUT", "parameters": {"binary_data": True, **parameters}}
    tensor = {"name": "IN", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    header = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    spec = TensorSpec("OUT", "FP32", 2, 4)
    response = InferResponse(Signature((spec,), ()), ((1, 500),), [memoryview(bytes(2000))])
    assert formats_more_than(1000, parse_request(header, config, 0), response) is heavy
