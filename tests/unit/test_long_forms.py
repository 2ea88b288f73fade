"""Long forms of gRPC requests: what may be long is taken out without Python, and read by a worker."""

import asyncio
import struct
import threading

import pytest
from hypothesis import given, strategies as st

from gpubridge import dataplane
from gpubridge.errors import BridgeError
from gpubridge.frontend.grpc import packing, stream
from gpubridge.protocol import body, classification
from gpubridge.protocol.fields import parse_json
from gpubridge.protocol.grpc import infer_request, receiver
from gpubridge.protocol.grpc.infer_request import FormCache, build_form, parse_form, read_request
from gpubridge.transport.signatures import Signature
from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message, workers_are_idle
from tests.unit.grpc_requests import Request, raw
from tests.unit.model_configs import model_config
from tests.waits import until

CONFIG = model_config(
    ";".join(
        f"{name} {kind} [-1] optional: true"
        for name, kind in zip(
            "BILUVFDS",
            ["BOOL", "INT8", "INT64", "UINT16", "UINT64", "FP32", "FP64", "STRING"],
            strict=False,
        )
    )
)

TYPED = {
    "B": ("BOOL", "bool_contents", [True, False]),
    "I": ("INT8", "int_contents", [-3, 7]),
    "L": ("INT64", "int64_contents", [-1, 1 << 40]),
    "U": ("UINT16", "uint_contents", [60_000, 1]),
    "V": ("UINT64", "uint64_contents", [1 << 63, 0]),
    "F": ("FP32", "fp32_contents", [1.5, -2.0]),
    "D": ("FP64", "fp64_contents", [0.1, 7.0]),
    "S": ("BYTES", "bytes_contents", [b"\xff\0", b""]),
}
COUNT = 70_000


def request(*names, count=COUNT, **fields):
    made = Request(model_name="m", **fields)
    for name in names or TYPED:
        datatype, field, values = TYPED[name]
        entry = made.inputs.add(name=name, datatype=datatype, shape=[count])
        getattr(entry.contents, field).extend((values * count)[:count])
    return made


def test_a_number_beyond_its_datatype_is_found_in_long_contents_too(monkeypatch):
    made = request("U")
    made.inputs[0].contents.uint_contents[COUNT - 1] = 70_000
    _, text = agree(made.SerializeToString(), monkeypatch)
    assert text == (
        f"element {COUNT - 1} of input 'U' is 70000, which is beyond the range of UINT16"
    )


def said(form, monkeypatch, *, split):
    """Return the contents of a form, or its error; read whole, or split."""
    with monkeypatch.context() as patch:
        patch.setattr(infer_request, "LONG_FORM_BYTES", 0 if split else 1 << 40)
        try:
            parsed, long = parse_form(form)
            made, empty_final = build_form(
                parsed, read_request(form), CONFIG, lambda region: None, long
            )
        except BridgeError as error:
            return error.code, error.message
    context = made.context
    parameters = (
        parse_json(bytes(context.parameters or "{}", "utf-8"))
        if isinstance(context.parameters, str)
        else parse_json(bytes(context.parameters))
    )
    options = made.options
    return (
        [
            (entry.name, entry.datatype, entry.shape, bytes(entry.data or b""))
            for entry in made.inputs
        ],
        made.places,
        parameters,
        (context.flags, context.correlation, context.timeout),
        (options.priority, options.timeout_us, options.start, options.end),
        empty_final,
    )


def agree(form, monkeypatch, *, split=True):
    """Check that a form says the same whole and split; returns that."""
    assert (dataplane.split_form(form) is not None) == split
    whole = said(form, monkeypatch, split=False)
    assert said(form, monkeypatch, split=True) == whole
    return whole


def test_typed_contents_of_every_kind(monkeypatch):
    form = request().SerializeToString()
    skeleton, parameters, places = dataplane.split_form(form)
    assert len(skeleton) < 1000
    assert parameters == b""
    assert all(places)
    assert len(agree(form, monkeypatch)[0]) == len(TYPED)


def test_short_contents_stay(monkeypatch):
    form = request("F", "S", count=5).SerializeToString()
    assert dataplane.split_form(form) == (form, b"", (None, None))


def set_all(made):
    parameters = made.parameters
    parameters["text"].string_param = 'é"\\\n\x01😀' * 30_000
    parameters["n" * 100_000].int64_param = -7
    parameters["yes"].bool_param = True
    parameters["half"].double_param = 0.5
    parameters["whole"].double_param = 1e300
    parameters["sequence_id"].string_param = "one"
    parameters["sequence_start"].bool_param = True
    parameters["priority"].uint64_param = 2
    parameters["timeout"].int64_param = -1
    parameters["triton_enable_empty_final_response"].bool_param = True


def test_parameters_of_every_kind(monkeypatch):
    made = request("F")
    set_all(made)
    _, _, parameters, *_ = agree(made.SerializeToString(), monkeypatch)
    assert len(parameters) == 5
    assert list(parameters) == sorted(parameters)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("priority", "int64_param", -1),
        ("priority", "string_param", "x" * 100_000),
        ("sequence_id", "string_param", "x" * 100_000),
        ("sequence_start", "int64_param", 1),
        ("triton_x", "bool_param", True),
        ("custom", "uint64_param", 1),
        ("n" * 100_000, "uint64_param", 1),
    ],
)
def test_wrong_parameters_are_told_alike(monkeypatch, name, field, value):
    made = request("F")
    set_all(made)
    setattr(made.parameters[name], field, value)
    code, _ = agree(made.SerializeToString(), monkeypatch)
    assert code


def test_wrong_contents_are_told_alike(monkeypatch):
    two = request("F")
    two.inputs[0].contents.int_contents.extend([1] * COUNT)
    other = request("F")
    other.inputs[0].datatype = "INT32"
    shape = request("S")
    shape.inputs[0].shape[0] = 3
    both = request("F", raw_input_contents=[b"1234"])
    for wrong in (two, other, shape, both):
        agree(read_request(wrong.SerializeToString()).form, monkeypatch)


def test_the_last_of_a_name_counts(monkeypatch):
    form = request("F").SerializeToString()
    for text in ("first", "last" * 20_000):
        part = Request()
        part.parameters["x"].string_param = text
        form += part.SerializeToString()
    assert agree(form, monkeypatch)[2] == {"x": "last" * 20_000}


def test_parameters_of_tensors_that_mean_nothing_are_left_out(monkeypatch):
    made = request("F")
    made.inputs[0].parameters["x" * 100_000].bool_param = True
    made.inputs[0].parameters["shared_memory_byte_size"].int64_param = 4
    form = made.SerializeToString()
    assert len(dataplane.split_form(form)[0]) < 1000
    agree(form, monkeypatch)


UNUSUAL = [
    b"\xa0\x06\x96\x01",
    b"\x22\x04\x12\x00\x0a\x00",
    b"\x22\x03\x0a\x01\xff",
    b"\x22\x08\x0a\x01x\x12\x03\x1a\x01\xff",
    b"\x22\x02\x0a\x05",
    b"\x2a\x04\x2a\x00\x2a\x00",
]


@pytest.mark.parametrize("part", UNUSUAL)
def test_unusual_documents_are_left_whole(monkeypatch, part):
    agree(request("F", count=3).SerializeToString() + part, monkeypatch, split=False)


@given(st.data())
def test_mutated_forms_say_the_same(data):
    made = request("F", "S", count=3)
    made.parameters["x"].string_param = "é"
    made.parameters["priority"].int64_param = 1
    form = bytearray(made.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        form[data.draw(st.integers(0, len(form) - 1))] = data.draw(st.integers(0, 255))
    with pytest.MonkeyPatch.context() as patch:
        assert said(bytes(form), patch, split=True) == said(bytes(form), patch, split=False)


TEXT = "x" * 300_000


def long_call(stream_id, method, *, model="m", end=True):
    made = raw(("A", "FP32", [2], b"goodbad!"), id="long")
    made.model_name = model
    made.parameters["text"].string_param = TEXT
    sent = message(made.SerializeToString())
    return head(stream_id, method) + frame(0, int(end), stream_id, sent)


@pytest.fixture
def readers(monkeypatch):
    """The threads that have read forms, of which shorter ones are long here."""
    for module in (infer_request, receiver):
        monkeypatch.setattr(module, "LONG_FORM_BYTES", 100_000)
    monkeypatch.setattr(stream, "HEAVY_BYTES", 100_000)
    readers = []
    read = FormCache.read_once

    def note(self, head):
        readers.append(threading.current_thread())
        return read(self, head)

    monkeypatch.setattr(FormCache, "read_once", note)
    return readers


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("model", ["m", "missing"])
async def test_a_worker_reads_long_parameters(readers, method, model):
    endpoint = GrpcEndpoint(deferred=True)
    endpoint.receive(PREFACE, long_call(1, method, model=model))
    # Others are not held up by it.
    endpoint.receive(long_call(3, "ModelInfer")[:100])
    if model == "m":
        await until(lambda: endpoint.waiting)
        ((_, request),) = endpoint.waiting
        assert bytes(request.context.parameters) == b'{"text":"%b"}' % TEXT.encode()
        await endpoint.settle()
    await until(lambda: 1 in endpoint.statuses())
    assert endpoint.statuses()[1] == [0 if model == "m" or "Stream" in method else 5]
    assert threading.main_thread() not in readers
    assert len(readers) == 1
    endpoint.lose()
    assert endpoint.regions.lent() == (0, 0)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_a_call_that_is_gone_before_it_is_read_leaves_nothing(readers, method):
    endpoint = GrpcEndpoint(deferred=True)
    endpoint.receive(PREFACE, long_call(1, method))
    # A worker begins to read it.
    await asyncio.sleep(0)
    endpoint.lose()
    await until(lambda: readers)
    await workers_are_idle()
    assert not endpoint.waiting
    assert endpoint.regions.lent() == (0, 0)
    assert endpoint.connection.account.held == 0


def unary(made):
    return head(1, "ModelInfer") + frame(0, 1, 1, message(made.SerializeToString()))


@pytest.mark.parametrize("lost", [False, True])
async def test_long_contents_are_copied_in_turns(readers, monkeypatch, lost):
    monkeypatch.setattr(body, "_PIECE", 1000)
    endpoint = GrpcEndpoint(deferred=True)
    made = Request(model_name="m")
    made.inputs.add(name="A", datatype="FP32", shape=[COUNT])
    made.inputs[0].contents.fp32_contents.extend(range(COUNT))
    endpoint.receive(PREFACE, unary(made))
    if lost:
        await until(lambda: endpoint.regions.lent() != (0, 0), 0)
        assert not endpoint.waiting
        endpoint.lose()
        await asyncio.sleep(0)
    else:
        await until(lambda: endpoint.waiting)
        ((_, sent),) = endpoint.waiting
        ((at, nbytes),) = sent.places
        assert sent.slot.memory[at : at + nbytes].cast("f").tolist() == list(range(COUNT))
        await endpoint.settle()
        endpoint.lose()
    assert not endpoint.waiting
    assert endpoint.regions.lent() == (0, 0)
    assert endpoint.connection.account.held == 0


@pytest.mark.parametrize("count", [1, 2])
async def test_a_worker_checks_long_strings(readers, monkeypatch, count):
    monkeypatch.setattr(receiver, "LONG_STRINGS", 100_000)
    endpoint = GrpcEndpoint()
    string = b"s" * 200_000
    tensors = ("A", "FP32", [1], b"good"), ("S", "BYTES", [1])
    strings = count * (len(string).to_bytes(4, "little") + string)
    endpoint.receive(PREFACE, unary(raw(tensors[0], (*tensors[1], strings))))
    await until(lambda: 1 in endpoint.statuses())
    assert endpoint.statuses()[1] == [0 if count == 1 else 3]
    assert threading.main_thread() not in readers
    endpoint.lose()
    assert endpoint.regions.lent() == (0, 0)


@pytest.mark.parametrize(
    ("model", "method"), [("m", "ModelInfer"), ("m", "ModelStreamInfer"), ("d", "ModelStreamInfer")]
)
@pytest.mark.parametrize("datatype", ["FP32", "FP16"])
async def test_a_worker_finds_classes_of_much(monkeypatch, model, method, datatype):
    monkeypatch.setattr(packing, "HEAVY_BYTES", 3)
    threads = []
    find = classification.classified

    def note(response, classes, config):
        threads.append(threading.current_thread())
        (spec,) = response.signature.tensors
        response.signature = Signature((spec._replace(datatype=datatype),), ())
        return find(response, classes, config)

    monkeypatch.setattr(classification, "classified", note)
    endpoint = GrpcEndpoint()
    made = raw(("A", "FP32", [1], struct.pack("<f", 2.5)), id="one")
    made.model_name = model
    made.outputs.add(name="OUT").parameters["classification"].int64_param = 1
    sent = message(made.SerializeToString())
    streamed = "Stream" in method
    endpoint.receive(PREFACE, head(1, method) + frame(0, 1, 1, sent))
    await until(lambda: 1 in endpoint.statuses())
    assert endpoint.statuses()[1] == [0 if datatype == "FP32" or streamed else 3]
    data = endpoint.data(1)
    assert (b"2.500000:0" in data) == (datatype == "FP32")
    assert (b"unsupported type" in data) == (datatype == "FP16" and streamed)
    assert threads
    assert threading.main_thread() not in threads
    endpoint.lose()
    assert endpoint.regions.lent() == (0, 0)
