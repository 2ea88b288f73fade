"""Memory that a model asks for before it fills it: Tensor.empty() and InferenceRequest.output()."""

import sys

import numpy as np
import pytest

from gpubridge import pb_utils
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils.trace import NO_TRACE
from gpubridge.tensor.streams import ANY_STREAM
from tests.unit.device_doubles import MODEL_STREAM, seen_by_consumer

Tensor = pb_utils.Tensor
Failure = pb_utils.TritonModelException


class Named:
    """A framework's name of a device, or of a dtype."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


class Origin:
    """Origin of a request, of which only the outputs matter here."""

    def output(self, name, datatype, shape, dtype):
        return "host", name, datatype, shape, dtype

    def output_on_device(self, form):
        return "device", form.name, form.datatype, form.shape, form.nbytes


@pytest.fixture(params=[True, False], ids=["received", "made"])
def output(request):
    """``output()`` of a request, and whether that came from a server."""
    if request.param:
        received = pb_utils.InferenceRequest._received(
            [], "", 0, ["OUT"], 0, 0, "{}", "m", 1, Origin(), NO_TRACE
        )
        return received.output, True
    return pb_utils.InferenceRequest(
        inputs=[], requested_output_names=["OUT"], model_name="m"
    ).output, False


def test_on_the_host():
    for device in (None, "cpu", Named("cpu")):
        tensor = Tensor.empty("OUT", (2, 3), np.float16, device)
        assert tensor.is_cpu()
        assert tensor.name() == "OUT"
        tensor.as_numpy()[:] = 3
        assert bytes(tensor._payload()) == np.full((2, 3), 3, np.float16).tobytes()


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, Named("cuda:0"), Named("cuda")])
def test_on_the_gpu(device, memory):
    tensor = Tensor.empty("OUT", [2, 3], "FP32", device)
    assert tensor.device == "cuda:0"
    assert tensor.shape() == [2, 3]
    data = tensor._device_bytes
    assert data.nbytes == 24
    assert data.owner.address == data.pointer
    assert seen_by_consumer(tensor.__dlpack__(stream=MODEL_STREAM))[0] == data.pointer
    assert set(data.streams) == {ANY_STREAM}
    data.owner.write(np.arange(6, dtype=np.float32).tobytes())
    assert tensor.as_numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_no_elements_on_the_gpu(memory):
    memory.failure = BridgeError("the arena was asked")
    tensor = Tensor.empty("OUT", (0, 3), "FP32", "cuda")
    assert tensor._device_bytes.pointer == 0
    assert tensor.as_numpy().shape == (0, 3)


def test_a_full_arena(memory):
    memory.failure = BridgeError("the arena is full", ErrorCode.UNAVAILABLE)
    with pytest.raises(Failure, match=r"^the arena is full$"):
        Tensor.empty("OUT", (1,), "FP32", "cuda")


@pytest.mark.parametrize("device", ["cuda:1", 1, "rocm", Named("cuda:3"), "gpu"])
def test_other_devices(device, memory):
    with pytest.raises(Failure, match="expected device to be None, 'cpu', 'cuda' or 'cuda:0'"):
        Tensor.empty("OUT", (1,), "FP32", device)


def test_without_a_gpu():
    with pytest.raises(Failure, match="expected an instance on a GPU, got one without"):
        Tensor.empty("OUT", (1,), "FP32", "cuda")


@pytest.mark.parametrize(
    ("dtype", "datatype"),
    [
        (np.int8, "INT8"),
        ("float64", "FP64"),
        ("BOOL", "BOOL"),
        ("BF16", "BF16"),
        (Named("torch.float32"), "FP32"),
        (Named("torch.bfloat16"), "BF16"),
        (Named("torch.bool"), "BOOL"),
    ],
)
def test_dtypes(dtype, datatype, memory):
    assert Tensor.empty("OUT", (1,), dtype, "cuda")._datatype == datatype


def test_torchs_words(memory):
    torch = pytest.importorskip("torch")
    like = torch.zeros((2, 1), dtype=torch.bfloat16)
    tensor = Tensor.empty("OUT", like.shape, like.dtype, torch.device("cuda", 0))
    assert (tensor._datatype, tensor.shape()) == ("BF16", [2, 1])
    assert Tensor.empty("OUT", like.shape, torch.int16, like.device).is_cpu()


def test_bf16_on_the_host_needs_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(Failure, match="install ml_dtypes"):
        Tensor.empty("OUT", (1,), "BF16")


@pytest.mark.parametrize("dtype", ["BYTES", object, "S4", np.complex64, ">f4"])
def test_dtypes_without_a_counterpart(dtype):
    with pytest.raises(Failure, match="expected a dtype of a fixed size that has a counterpart"):
        Tensor.empty("OUT", (1,), dtype)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((None, (1,), "FP32"), TypeError),
        (("A", (-1,), "FP32"), TypeError),
        (("A", (1.0,), "FP32"), TypeError),
        (("A", (1,), "nonsense"), TypeError),
        (("A", (1,), Named("torch.nonsense")), TypeError),
        (("", (1,), "FP32"), Failure),
    ],
)
def test_arguments(arguments, kind):
    with pytest.raises(kind):
        Tensor.empty(*arguments)


def test_a_requests_output_on_the_host(output):
    make, received = output
    made = make("OUT", (2, 1), np.float32)
    if received:
        assert made == ("host", "OUT", "FP32", (2, 1), np.dtype(np.float32))
    else:
        assert made.is_cpu()
        assert made.as_numpy().shape == (2, 1)


def test_a_requests_output_on_the_gpu(output, memory):
    make, received = output
    made = make("OUT", (2, 1), "BF16", device="cuda")
    if received:
        assert made == ("device", "OUT", "BF16", (2, 1), 4)
    else:
        assert made.device == "cuda:0"
